// What caches have in common that give each request a row of its own, which nobody shares: their
// operations, the batch of rows, and captured prefixes. Where KV and states lie, and how a forward
// writes them, is the policy's own: `edge-llm` and `static-kv` derive from it.
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
  std::uint32_t verified = 0;  ///< its tokens
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
  /// Each row has a position.
  static Result<void> check_sizes(const Config& config);

  Result<Reply> apply(const Operation& operation) final;
  std::optional<Snapshot> snapshot() const final;

  // What an auditor sees.
  /// The requests of the rows; none: a hole.
  const std::vector<Name>& rows() const { return rows_; }
  const std::vector<std::uint32_t>& lengths() const { return lengths_; }
  const std::vector<RowRequest>& requests() const { return requests_; }
  const std::vector<CapturedPrefix>& captured() const { return captured_; }

 protected:
  /// `verified_most`: tokens that a verification can have.
  RowPolicy(const SubjectOptions& options, bool has_states, std::uint32_t verified_most);

  LayerState& layers_;
  std::vector<Name> rows_;              ///< the batch
  std::vector<std::uint32_t> lengths_;  ///< by row: what forwards read, and the policy writes

 private:
  virtual void begin_step() {}
  /// The row is a new request's. What admit answers.
  virtual Reply begin_row(std::uint32_t row) = 0;
  virtual void end_row(std::uint32_t /*row*/) {}
  /// Runs `n` of the tokens after the row's length; where the request verifies, the last of them
  /// are drafts, and the length may stay.
  virtual void run(std::uint32_t row, const Tokens& tokens, std::uint32_t n, bool verifies) = 0;
  /// Of the row's verification `accepted` tokens are kept, which the request knows by now.
  virtual void keep(const RowRequest& request, std::uint32_t row, std::uint32_t accepted) = 0;
  /// The row's first `size` positions and its states, to a place of the captured prefixes; and
  /// back: what restore answers.
  virtual void save(std::uint32_t row, std::uint32_t place, std::uint32_t size) = 0;
  virtual Reply load(std::uint32_t place, std::uint32_t row, std::uint32_t size) = 0;
  /// Row i becomes mapping[i], where that is not negative. The lengths of the `kept` rows.
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
