// Tracks what a trace of single operations has admitted, computed and locked so far, from the
// operations and their replies. The generator asks it which operations are legal next. The player
// asks it how to adapt an operation that was cut out of another trace.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "cache_sim/trace/trace.hpp"

namespace lockstep::cache_sim {

/// A statement and its meaning when it was last played, so that it can be adapted to mean the same.
struct Step {
  static constexpr std::int64_t kLiteral = -1;

  Statement statement;
  /// The number that the operation left undone: tokens not computed after an extend, computed
  /// tokens after the length of a checkpoint, nothing after an accept. kLiteral: its numbers are
  /// kept.
  std::int64_t rest = kLiteral;
  /// An insert whose tokens were those of its slot. An insert with other tokens would itself store
  /// a state under a wrong prefix, which is no defect of the subject.
  bool of_slot = false;
  /// Bad input by intent; it is not adapted.
  bool stands = false;
};
using Steps = std::vector<Step>;

/// Steps that play the statements unchanged.
Steps literal_steps(const std::vector<Statement>& statements);

class LegalityModel {
 public:
  /// A row whose result is out.
  struct Row {
    bool samples;  ///< its accept brings tokens
    std::int64_t drafts;
  };
  struct Request {
    Name id;
    Name salt;
    Tokens known;
    std::int64_t computed = 0;
    Tokens drafts;                      ///< drafts of a verification whose accept is due
    int in_flight = 0;                  ///< extends whose results are out
    bool samples = false;               ///< tokens came after those of the admission
    std::vector<std::int64_t> parents;  ///< parents of the drafts, if they form a tree
    std::int64_t external = 0;          ///< external= of the admission, until its first extend
    bool is_loading = false;            ///< these external tokens are being loaded
    bool loads = false;                 ///< its admission queued a load from the host tier
    /// the server took fewer tokens than an extend asked for, and some are left
    bool is_cut = false;
    std::vector<Row> rows;      ///< rows whose results bring their tokens, the oldest first
    std::int64_t promised = 0;  ///< tokens that these rows bring if all drafts are kept
    std::int64_t shortest = 0;  ///< shortest possible answer: no end was seen within these tokens
    bool is_on_first = false;   ///< of two servers; that one computes all its tokens but the last

    std::int64_t left() const { return known.size() + promised - computed - (is_on_first ? 1 : 0); }
    bool is_result_due() const { return !rows.empty() && rows.front().samples; }
  };
  struct Slot {
    Name name;
    Tokens tokens;  ///< the tokens for which its state stands
  };
  /// Tokens of a request that were captured under a name.
  struct Captured {
    Name name;
    Name salt;
    Tokens tokens;
    bool partial = false;
  };
  /// A node of the tree that the last reply named.
  struct Node {
    Tokens tokens;
    Name salt;
    bool has_state = false;
  };

  /// `counts_locks_on_tombstones`: PolicyEntry's flag of all subjects. `is_slot_cache`: a request
  /// that restores a capture keeps its own prompt, which begins with the captured tokens; in other
  /// caches it becomes the captured sequence.
  LegalityModel(std::int64_t page, bool counts_locks_on_tombstones, bool is_slot_cache = false)
      : page_(page),
        counts_locks_on_tombstones_(counts_locks_on_tombstones),
        is_slot_cache_(is_slot_cache) {}

  /// Subjects may cut chunks, and say so by n= of the reply: the rest is computed before the
  /// request samples. In other subjects a smaller n is a fault.
  void expect_cut_chunks() { cuts_chunks_ = true; }
  /// Steps run ahead of their results and verify drafts, so only results tell which tokens were
  /// sampled: rows are asked for without tokens.
  void expect_results_to_tell() { results_tell_ = true; }
  /// Requests move from one server to another.
  void expect_moves() { moves_ = true; }

  /// Records the effects of an operation that got this reply.
  void follow(const Operation& operation, const Reply& reply);
  /// Adapts the operation of the step to the current state, and notes its meaning. False if it
  /// makes no sense now.
  bool adapt(Step& step) const;
  /// Whether a server can be asked this now: the request runs, the slot and the lock exist, and the
  /// tokens to compute are known. A policy checks that itself; a child need not.
  bool makes_sense(const Operation& operation) const;

  // In order of admission.
  const std::vector<Request>& requests() const { return requests_; }
  const Request* find_request(Name id) const;  ///< null if it does not run
  const std::vector<Slot>& slots() const { return slots_; }
  const std::vector<Captured>& captured() const { return captured_; }
  const std::vector<Name>& locks() const { return locks_; }
  /// The rows of a slot cache and their requests. An admission takes the first free row.
  const std::vector<Name>& rows() const { return rows_; }
  /// requests that were not admitted
  const std::vector<Name>& refused() const { return refused_; }
  const std::vector<Tokens>& seen() const { return seen_; }  ///< prompts and stored keys
  const std::optional<Node>& shown() const { return shown_; }
  /// Whether the request can be set back to the capture: it is between forwards, has the same salt
  /// and, for a capture of a part of the state, still begins with these tokens.
  static bool can_restore(const Request& request, const Captured& captured);
  /// A lock that the next operation has to release (see PolicyEntry::counts_locks_on_tombstones).
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
  bool moves_ = false;
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
