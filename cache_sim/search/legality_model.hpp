// What a trace of single operations has admitted, computed and held so far, learned from the
// operations and the answers to them. The generator asks it which operation is legal next; the
// player asks it how an operation that was cut out of another trace has to be changed to be legal
// here.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "cache_sim/trace/trace.hpp"

namespace lockstep::cache_sim {

/// A statement and what it meant when it was last played, so that it can mean the same again.
struct Step {
  static constexpr std::int64_t kLiteral = -1;

  Statement statement;
  /// What it left undone: tokens not computed after an extend, computed tokens after a
  /// checkpoint's length, nothing after a verification's accept; kLiteral: its number is that.
  std::int64_t rest = kLiteral;
  /// insert: its tokens were those that its slot stood for. One that says otherwise lies about a
  /// state by itself, which is nobody's defect.
  bool of_slot = false;
  /// It is bad input by intent, so nothing makes it fit.
  bool stands = false;
};
using Steps = std::vector<Step>;

/// Statements to play as they stand.
Steps literal_steps(const std::vector<Statement>& statements);

class LegalityModel {
 public:
  /// A row whose result is out.
  struct Row {
    bool samples;  ///< its accept will tell tokens
    std::int64_t drafts;
  };
  struct Request {
    Name id;
    Name salt;
    Tokens known;
    std::int64_t computed = 0;
    Tokens drafts;                      ///< of a verification that waits for its accept
    int in_flight = 0;                  ///< extends whose results are out
    bool samples = false;               ///< tokens came after those of the admission
    std::vector<std::int64_t> parents;  ///< of the drafts, where they are a tree
    std::int64_t external = 0;          ///< of its admission, before its first extend
    bool is_loading = false;            ///< these tokens are under way
    bool is_cut = false;    ///< the server has taken less than was asked for, and something is left
    std::vector<Row> rows;  ///< whose tokens their results tell, the oldest first
    std::int64_t promised = 0;  ///< tokens that these bring, their drafts counted as kept
    std::int64_t shortest = 0;  ///< tokens that an answer has at least: no end was seen before them

    std::int64_t left() const { return known.size() + promised - computed; }
    bool is_result_due() const { return !rows.empty() && rows.front().samples; }
  };
  struct Slot {
    Name name;
    Tokens tokens;  ///< that its state stands for
  };
  /// A request's tokens that were kept under a name.
  struct Captured {
    Name name;
    Name salt;
    Tokens tokens;
    bool partial = false;
  };
  /// A node of the tree that the last reply showed.
  struct Node {
    Tokens tokens;
    Name salt;
    bool has_state = false;
  };

  /// `counts_locks_on_tombstones` as in PolicyEntry, of all subjects. In a slot cache a request
  /// that is given what was captured keeps the prompt that begins with it; a sequence becomes what
  /// was captured.
  LegalityModel(std::int64_t page, bool counts_locks_on_tombstones, bool is_slot_cache = false)
      : page_(page),
        counts_locks_on_tombstones_(counts_locks_on_tombstones),
        is_slot_cache_(is_slot_cache) {}

  /// The subjects cut chunks where they have to end and say so by n=: what is left is computed
  /// before anything is sampled. Of others, less than was asked for is a fault.
  void expect_cut_chunks() { cuts_chunks_ = true; }
  /// Steps run ahead of results, and with drafts these alone tell what was sampled: rows are asked
  /// for without their tokens.
  void expect_results_to_tell() { results_tell_ = true; }

  /// Takes note of what the operation, which was answered so, did.
  void follow(const Operation& operation, const Reply& reply);
  /// Fits the step's operation to what is there, and notes what it means. False where it makes no
  /// sense.
  bool adapt(Step& step) const;
  /// Whether a server can be asked this now: its request runs, its slot and its lock are there, and
  /// what it computes is known. Policies say so themselves; a child need not.
  bool makes_sense(const Operation& operation) const;

  // In the order in which they came.
  const std::vector<Request>& requests() const { return requests_; }
  const Request* find_request(Name id) const;  ///< null where it does not run
  const std::vector<Slot>& slots() const { return slots_; }
  const std::vector<Captured>& captured() const { return captured_; }
  const std::vector<Name>& locks() const { return locks_; }
  /// Requests by row of a slot cache: an admission takes the first row without one.
  const std::vector<Name>& rows() const { return rows_; }
  const std::vector<Name>& refused() const { return refused_; }  ///< requests not admitted
  const std::vector<Tokens>& seen() const { return seen_; }      ///< prompts and stored keys
  const std::optional<Node>& shown() const { return shown_; }
  /// Whether the request can be set back to what was captured: between forwards, of the same salt,
  /// and of a part of its state alone where it still begins with these tokens.
  static bool can_restore(const Request& request, const Captured& captured);
  /// A lock that has to be released by the next operation (see PolicyEntry).
  Name bare_lock() const { return bare_lock_; }

 private:
  bool makes_sense_for(const Request& request, const Operation& operation) const;
  bool is_sequence_sense(const Request& request, const Operation& operation) const;
  const Slot* find_slot(Name name) const;
  void follow_request(const Operation& operation, const Reply& reply);
  void follow_extend(const Operation& operation, const Reply& reply, Request& request) const;
  void follow_sequence(const Operation& operation, Request& request);
  void follow_slot(const Operation& operation, const Reply& reply);
  void follow_compaction(const Operation& operation);
  void give_slot(Name name, const Tokens& tokens);
  void drop_slot(Name name);
  bool contradicts_itself(const Operation& operation) const;
  bool adapt_insert(Operation& operation, bool& of_slot) const;
  void adapt_extend(Operation& operation, std::int64_t& rest) const;
  void adapt_checkpoint(Operation& operation, std::int64_t& rest) const;

  std::int64_t page_;
  bool counts_locks_on_tombstones_;
  bool is_slot_cache_;
  bool cuts_chunks_ = false;
  bool results_tell_ = false;
  std::vector<Request> requests_;
  std::vector<Slot> slots_;
  std::vector<Captured> captured_;
  std::vector<Name> locks_;
  std::vector<Name> rows_;
  std::vector<Name> refused_;
  std::vector<Tokens> seen_;
  std::optional<Node> shown_;
  Name bare_lock_;
};

}  // namespace lockstep::cache_sim
