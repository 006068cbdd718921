#include "cache_sim/policies/static_kv/static_kv_policy.hpp"

#include <algorithm>
#include <limits>
#include <numeric>

#include "reference/base/mark.hpp"

namespace lockstep::cache_sim {
namespace {

/// The first call of a forward: its tokens, and the size of its bucket.
struct Cut {
  std::uint32_t tokens, bucket;
};

/// The smallest bucket that holds the n tokens and ends within `positions`; if there is none, the
/// largest bucket that the tokens fill. Buckets are 1, 4, 16, …
Cut first_call(std::uint32_t n, std::uint32_t past, std::uint32_t positions, bool over_the_end) {
  if (n == 1) return {1, 1};
  std::uint64_t filled = 1;
  for (std::uint64_t bucket = 4; over_the_end || past + bucket <= positions; bucket *= 4) {
    if (bucket >= n) return {n, static_cast<std::uint32_t>(bucket)};
    filled = bucket;
  }
  LOCKSTEP_MARK("static_kv.splits_a_prompt");
  return {static_cast<std::uint32_t>(filled), static_cast<std::uint32_t>(filled)};
}

}  // namespace

StaticKvPolicy::Areas StaticKvPolicy::areas_of(const Config& config) {
  const Sizes sizes = sizes_of(config);
  return {sizes.rows, sizes.positions, sizes.captures};
}

StaticKvPolicy::StaticKvPolicy(const SubjectOptions& options)
    : RowPolicy(options, false, std::numeric_limits<std::uint32_t>::max()),
      rules_(with_defect(StaticKvRules{}, options.defect)),
      areas_(areas_of(options.config)) {
  if (!layers_.keeps_kv()) return;
  const auto count = static_cast<std::size_t>(areas_.slots());
  auto slots = std::make_shared_for_overwrite<std::uint32_t[]>(count);
  std::iota(slots.get(), slots.get() + count, 1u);
  layers_.allocate_kv({slots.get(), count});  // once, as an exported model's tensors are
  slots_ = std::move(slots);
}

// --- Forwards ------------------------------------------------------------------------------------

/// The area's slots for places 0 … size - 1, modulo M.
KvRuns StaticKvPolicy::places_of(std::uint32_t area, std::uint32_t size) const {
  KvRuns runs;
  if (slots_ == nullptr) return runs;
  for (std::uint32_t place = 0; place < size; place += areas_.positions)
    runs.push_back({slots_, areas_.first_slot(area) - 1, std::min(areas_.positions, size - place)});
  return runs;
}

/// Positions [begin, end) of one area become those from `target` on of another.
void StaticKvPolicy::copy(std::uint32_t from, std::uint32_t to, std::uint32_t begin,
                          std::uint32_t end, std::uint32_t target) {
  if (!layers_.keeps_kv() || begin >= end) return;
  const std::size_t size = end - begin;
  layers_.copy_kv({slots_.get() + areas_.first_slot(from) - 1 + begin, size},
                  {slots_.get() + areas_.first_slot(to) - 1 + target, size});
}

/// One call of the program: `n` tokens after `past`, padded to the bucket. Of all tokens, the last
/// `drafts` are drafts.
void StaticKvPolicy::call(std::uint32_t row, const Tokens& tokens, std::uint32_t drafts,
                          std::uint32_t past, std::uint32_t n, std::uint32_t bucket) {
  if (rules_.copies_past) copy(area_of(row), areas_.copy(), 0, past, 0);
  attended_ = {rows_[row], tokens.prefix(past + n)};
  const std::uint32_t known = tokens.size() - drafts;
  const KvRuns copied = places_of(areas_.copy(), past + bucket);
  const KvRuns sidecar = places_of(areas_.sidecar(), past + bucket);
  layers_.forward({.request = rows_[row],
                   .tokens = tokens,
                   .begin = past,
                   .end = past + n,
                   .drafts = past + n - std::clamp(known, past, past + n),
                   .kv = copied,
                   .writes_kv = rules_.writes_twice,
                   .padded_to = past + bucket,
                   .also = sidecar});
  const std::uint32_t applied = rules_.commits_tail ? bucket : n;
  copy(areas_.sidecar(), area_of(row), past, past + applied, rules_.applies_at_front ? 0 : past);
  lengths_[row] = past + applied;
}

/// Computes `n` tokens from the row's length on, call by call.
void StaticKvPolicy::run(std::uint32_t row, const Tokens& tokens, std::uint32_t n,
                         std::uint32_t drafts) {
  const std::uint32_t begin = lengths_[row];
  for (std::uint32_t done = 0; done < n;) {
    const std::uint32_t from = rules_.counts_from_live_length ? lengths_[row] : begin;
    const std::uint32_t past = from + done;
    if (past >= std::min(areas_.positions, tokens.size())) return;  // a defect only
    const std::uint32_t left = std::min({n - done, areas_.positions - past, tokens.size() - past});
    const Cut cut = first_call(left, past, areas_.positions, rules_.wraps_around);
    call(row, tokens, drafts, past, cut.tokens, cut.bucket);
    done += cut.tokens;
  }
}

// --- Rows ----------------------------------------------------------------------------------------

Reply StaticKvPolicy::begin_row(std::uint32_t row) {
  if (rules_.resets_length) lengths_[row] = 0;
  return Reply{}.set(ReplyField::cached, 0);
}

/// The KV that a verification has applied stays in the row; the row's length goes back to the
/// accepted tokens.
void StaticKvPolicy::keep(const RowRequest& request, std::uint32_t row, std::uint32_t accepted) {
  if (rules_.drops_rejected_drafts) lengths_[row] = request.computed + accepted;
  if (accepted < request.verified) LOCKSTEP_MARK("static_kv.takes_drafts_back");
}

void StaticKvPolicy::save(std::uint32_t row, std::uint32_t place, std::uint32_t size) {
  copy(area_of(row), areas_.captured(place), 0, size, 0);
}

Reply StaticKvPolicy::load(std::uint32_t place, std::uint32_t row, std::uint32_t size) {
  copy(areas_.captured(place), area_of(row), 0, size - (rules_.restores_last_token ? 0 : 1), 0);
  lengths_[row] = size;
  return Reply{}.set(ReplyField::cached, size);
}

/// Copies the keys and values of every row into the other tensor, as `reorder_cache` of a beam
/// search does.
std::vector<std::uint32_t> StaticKvPolicy::reorder(const std::vector<std::int64_t>& mapping,
                                                   std::uint32_t kept) {
  const std::uint32_t from = reordered_ ? areas_.rows : 0;
  const std::uint32_t to = rules_.reorders_in_place ? from : areas_.rows - from;
  std::vector<std::uint32_t> lengths(lengths_.begin(), lengths_.begin() + kept);
  for (std::uint32_t i = 0; i < mapping.size(); ++i) {
    if (mapping[i] < 0) continue;
    const auto row = static_cast<std::uint32_t>(mapping[i]);
    copy(from + i, to + row, 0, lengths_[i], 0);
    if (rules_.reorders_lengths) lengths[row] = lengths_[i];
  }
  if (!rules_.reorders_in_place) reordered_ = !reordered_;
  return lengths;
}

namespace {

Result<void> check_config(const Config& config) {
  if (Result<void> sizes = RowPolicy::check_sizes(config); !sizes) return sizes;
  constexpr double kMostSlots = 1 << 28;
  const double areas =
      2.0 * static_cast<double>(config.rows()) + 2 + static_cast<double>(config.state_slots);
  if (areas * static_cast<double>(config.kv_tokens) / static_cast<double>(config.rows()) >
      kMostSlots)
    return fail("field kv_tokens: rows and captured prefixes make too many slots");
  return {};
}

const Registration<PolicyEntry> kStaticKv{
    {.name = "static-kv",
     .summary = "rows of a model exported with fixed shapes: buckets, a sidecar, reorderings",
     .has_states = false,
     .config_fields = {"state_slots"},
     .make = [](const SubjectOptions& options) -> std::unique_ptr<Subject> {
       return std::make_unique<StaticKvPolicy>(options);
     },
     .check = check_config,
     .slots = [](const Config& config) -> PolicyEntry::SlotCounts {
       return {config.state_slots, StaticKvPolicy::areas_of(config).slots() + 1};
     },
     .capabilities = {Capability::slots},
     .tells_forwards = true}};

}  // namespace
}  // namespace lockstep::cache_sim
