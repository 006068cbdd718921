// The cache of a model exported with fixed shapes: policy `static-kv`. Each request has a row of M
// positions to itself; attention alone. Rules: reference/caches/static_kv.md, tensors in
// reference/attention/static_kv_update.hpp.
//
// A forward is cut into calls of one bucket each; bucket sizes are powers of four. A call writes
// its keys and values twice: into a copy of the row, to which its queries attend, and into a
// sidecar. Then the sidecar's entries of real tokens are applied to the row. Those of the bucket's
// padding are not.
//
// The KV slots form areas of M: one for each row, a second set of rows for reorderings, the copy,
// the sidecar, and one for each captured prefix.
#pragma once

#include <cstdint>
#include <vector>

#include "cache_sim/policies/pools.hpp"
#include "cache_sim/policies/row_policy.hpp"

namespace lockstep::cache_sim {

/// The rules that a planted defect can break (static_kv_defects.cpp).
struct StaticKvRules {
  bool copies_past = true;    ///< into the copy that the call's queries attend to
  bool writes_twice = true;   ///< into that copy and into the sidecar
  bool commits_tail = false;  ///< applies the padding of the bucket, too
  bool applies_at_front = false;
  bool counts_from_live_length = false;
  bool wraps_around = false;
  bool resets_length = true;
  bool reorders_lengths = true;
  bool reorders_in_place = false;
  bool drops_rejected_drafts = true;
  bool restores_last_token = true;
};

class StaticKvPolicy final : public RowPolicy {
 public:
  explicit StaticKvPolicy(const SubjectOptions& options);

  /// Numbers of KV areas, and of the positions M of each.
  struct Areas {
    std::uint32_t rows, positions, captures;
    std::uint32_t copy() const { return 2 * rows; }
    std::uint32_t sidecar() const { return 2 * rows + 1; }
    std::uint32_t captured(std::uint32_t place) const { return 2 * rows + 2 + place; }
    std::int64_t slots() const { return std::int64_t{2 * rows + 2 + captures} * positions; }
    std::uint32_t first_slot(std::uint32_t area) const { return 1 + area * positions; }
  };
  static Areas areas_of(const Config& config);

  /// The tokens that the queries of the last call attended to, in the area copy(). No request
  /// before the first call.
  struct Attended {
    Name request;
    Tokens tokens;
  };

  // For auditors.
  const Areas& areas() const { return areas_; }
  const Attended& attended() const { return attended_; }
  /// The area where a row's keys and values are now.
  std::uint32_t area_of(std::uint32_t row) const { return reordered_ ? areas_.rows + row : row; }

 private:
  Reply begin_row(std::uint32_t row) override;
  void run(std::uint32_t row, const Tokens& tokens, std::uint32_t n, std::uint32_t drafts) override;
  void keep(const RowRequest& request, std::uint32_t row, std::uint32_t accepted) override;
  void save(std::uint32_t row, std::uint32_t place, std::uint32_t size) override;
  Reply load(std::uint32_t place, std::uint32_t row, std::uint32_t size) override;
  std::vector<std::uint32_t> reorder(const std::vector<std::int64_t>& mapping,
                                     std::uint32_t kept) override;

  void call(std::uint32_t row, const Tokens& tokens, std::uint32_t drafts, std::uint32_t past,
            std::uint32_t n, std::uint32_t bucket);
  KvRuns places_of(std::uint32_t area, std::uint32_t size) const;
  void copy(std::uint32_t from, std::uint32_t to, std::uint32_t begin, std::uint32_t end,
            std::uint32_t target);

  const StaticKvRules rules_;
  const Areas areas_;
  bool reordered_ = false;  ///< the rows' tensor is the second of the two
  Attended attended_;
  std::shared_ptr<const std::uint32_t[]> slots_;  ///< of all areas; null where no KV is kept
};

}  // namespace lockstep::cache_sim
