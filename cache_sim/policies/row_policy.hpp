// Base of caches that give each request a row of its own, shared with no other request. The base
// answers the operations and keeps the batch of rows and the captured prefixes. A derived policy
// decides where KV and states lie and how a forward writes them.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "reference/protocol/subject.hpp"

namespace lockstep::cache_sim {

/// A running request.
struct RowRequest {
  Name id;
  Name salt;
  Tokens known;
  std::uint32_t computed = 0;
  Tokens drafts;               ///< of a verification that was not accepted yet
  std::uint32_t verified = 0;  ///< tokens of that verification
};

struct CapturedPrefix {
  Name name;
  Name salt;
  Tokens tokens;
};

class RowPolicy : public Subject {
 public:
  struct Sizes {
    std::uint32_t rows;
    std::uint32_t positions;  ///< of a row
    std::uint32_t captures;   ///< prefixes that can be captured
  };
  static Sizes sizes_of(const Config& config);
  /// Refuses a configuration in which a row has no position.
  static Result<void> check_sizes(const Config& config);

  Result<Reply> apply(const Operation& operation) final;
  std::optional<Snapshot> snapshot() const final;

  // For auditors.
  /// By row, its request; no name: a hole.
  const std::vector<Name>& rows() const { return rows_; }
  const std::vector<std::uint32_t>& lengths() const { return lengths_; }
  const std::vector<RowRequest>& requests() const { return requests_; }
  const std::vector<CapturedPrefix>& captured() const { return captured_; }

 protected:
  /// `verified_most`: the most tokens of a verification.
  RowPolicy(const SubjectOptions& options, bool has_states, std::uint32_t verified_most);

  LayerState& layers_;
  std::vector<Name> rows_;              ///< the batch
  std::vector<std::uint32_t> lengths_;  ///< by row: tokens, as forwards read it

 private:
  virtual void begin_step() {}
  /// Gives the row to a new request; returns the answer to its admission.
  virtual Reply begin_row(std::uint32_t row) = 0;
  virtual void end_row(std::uint32_t /*row*/) {}
  /// Runs `n` tokens from the row's length on. In a verification the last of them are drafts, and
  /// the length may stay as it is until the accept.
  virtual void run(std::uint32_t row, const Tokens& tokens, std::uint32_t n,
                   std::uint32_t drafts) = 0;
  /// Keeps the first `accepted` tokens of the row's verification; request.known holds them already.
  virtual void keep(const RowRequest& request, std::uint32_t row, std::uint32_t accepted) = 0;
  /// Copies the row's first `size` positions and its states to a place of the captured prefixes.
  virtual void save(std::uint32_t row, std::uint32_t place, std::uint32_t size) = 0;
  /// The copy in the other direction; returns the answer to `restore`.
  virtual Reply load(std::uint32_t place, std::uint32_t row, std::uint32_t size) = 0;
  /// Row i becomes row mapping[i] unless that is negative. Returns the lengths of the `kept` rows.
  virtual std::vector<std::uint32_t> reorder(const std::vector<std::int64_t>& mapping,
                                             std::uint32_t kept) = 0;

  Result<Reply> admit(const Operation& operation);
  Result<Reply> extend(RowRequest& request, const Operation& operation);
  Result<Reply> accept(RowRequest& request, const Operation& operation);
  Result<Reply> capture(const RowRequest& request, const Operation& operation);
  Result<Reply> restore(RowRequest& request, const Operation& operation);
  Result<Reply> compact(const Operation& operation);
  void end(const RowRequest& request);
  Reply check() const;
  RowRequest* find(Name id);
  std::uint32_t row_of(const RowRequest& request) const;

  const Sizes sizes_;
  const bool has_states_;
  const std::uint32_t verified_most_;
  std::vector<RowRequest> requests_;
  std::vector<CapturedPrefix> captured_;
};

}  // namespace lockstep::cache_sim
