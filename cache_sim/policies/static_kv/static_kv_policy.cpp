#include "cache_sim/policies/static_kv/static_kv_policy.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "cache_sim/policies/static_kv/static_kv_defects.hpp"
#include "reference/base/counted.hpp"
#include "reference/base/mark.hpp"

namespace lockstep::cache_sim {
namespace {

/// How a forward of `n` tokens begins behind `past`: so many of them, in a bucket of that size.
struct Cut {
  std::uint32_t tokens, bucket;
};

/// The smallest bucket that holds the tokens and ends inside `positions`; where there is none, the
/// largest that they fill, and at last one token. Buckets are 1, 4, 16, …
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
  return {static_cast<std::uint32_t>(config.rows()),
          static_cast<std::uint32_t>(config.kv_tokens / config.rows()),
          static_cast<std::uint32_t>(config.state_slots)};
}

StaticKvPolicy::StaticKvPolicy(const SubjectOptions& options)
    : config_(options.config),
      defect_(options.defect),
      layers_(*options.layers),
      areas_(areas_of(config_)) {
  if (!layers_.keeps_kv()) return;
  std::vector<std::uint32_t> slots(static_cast<std::size_t>(areas_.slots()));
  std::iota(slots.begin(), slots.end(), 1u);
  layers_.allocate_kv(slots);  // once, as an exported model's tensors are
}

Result<Reply> StaticKvPolicy::apply(const Operation& operation) {
  switch (operation.verb) {
    case Verb::admit: return admit(operation);
    case Verb::compact: return compact(operation);
    case Verb::step: return Reply{};
    case Verb::evict:
      if (operation.room != Operation::kAbsent) return fail("evict: rows keep no room for others");
      [[fallthrough]];
    case Verb::flush: return Reply{}.set(ReplyField::kv, 0).set(ReplyField::state, 0);
    case Verb::check: return check();
    case Verb::extend:
    case Verb::accept:
    case Verb::checkpoint:
    case Verb::finish:
    case Verb::abort:
    case Verb::preempt:
    case Verb::capture:
    case Verb::restore: break;
    default: return fail(fmt::format("{} is not an operation of rows", to_string(operation.verb)));
  }
  StaticKvRequest* const request = find(operation.id);
  if (request == nullptr) return no_such_request(operation);
  if (discards(operation)) {
    end(*request);
    return Reply{};
  }
  if (operation.verb == Verb::accept) return accept(*request, operation);
  const bool is_verifying = !request->drafts.empty();
  if (const Result<void> settled = check_is_settled(operation, is_verifying); !settled)
    return tl::unexpected(settled.error());
  switch (operation.verb) {
    case Verb::extend: return extend(*request, operation);
    case Verb::capture: return capture(*request, operation);
    case Verb::restore: return restore(*request, operation);
    case Verb::finish: end(*request); break;
    default:
      if (operation.up_to > request->computed)
        return fail(fmt::format("checkpoint: up_to={} is beyond the {}", operation.up_to,
                                counted(request->computed, "computed token")));
  }
  return Reply{}.set(ReplyField::exist, 0).set(ReplyField::length, 0);  // nothing stays
}

StaticKvRequest* StaticKvPolicy::find(Name id) {
  const auto found = std::find_if(requests_.begin(), requests_.end(),
                                  [&](const StaticKvRequest& request) { return request.id == id; });
  return found == requests_.end() ? nullptr : &*found;
}

std::uint32_t StaticKvPolicy::row_of(const StaticKvRequest& request) const {
  return static_cast<std::uint32_t>(std::find(rows_.begin(), rows_.end(), request.id) -
                                    rows_.begin());
}

// --- Forwards ------------------------------------------------------------------------------------

/// The forward writes KV of tokens[begin, end) to these positions of the area, modulo M.
void StaticKvPolicy::write(std::uint32_t area, const Tokens& tokens, std::uint32_t begin,
                           std::uint32_t end) {
  if (!layers_.keeps_kv()) return;
  targets_.clear();
  for (std::uint32_t position = begin; position < end; ++position)
    targets_.push_back(areas_.first_slot(area) + position % areas_.positions);
  layers_.write_kv(targets_, tokens, begin);
}

/// Positions [begin, end) of one area become those from `target` on of another.
void StaticKvPolicy::copy(std::uint32_t from, std::uint32_t to, std::uint32_t begin,
                          std::uint32_t end, std::uint32_t target) {
  if (!layers_.keeps_kv() || begin >= end) return;
  sources_.resize(end - begin);
  targets_.resize(end - begin);
  std::iota(sources_.begin(), sources_.end(), areas_.first_slot(from) + begin);
  std::iota(targets_.begin(), targets_.end(), areas_.first_slot(to) + target);
  layers_.copy_kv(sources_, targets_);
}

/// One program: `n` tokens behind `past`, padded to the bucket.
void StaticKvPolicy::call(std::uint32_t row, const Tokens& tokens, std::uint32_t past,
                          std::uint32_t n, std::uint32_t bucket) {
  const Tokens padding = Tokens::of_ids(std::vector<std::uint32_t>(bucket - n, 0));
  const Tokens padded = tokens.prefix(past + n).followed_by(padding);
  if (!planted(kStaticForgetsPast)) copy(area_of(row), areas_.copy(), 0, past, 0);
  if (!planted(kStaticWritesOnce)) write(areas_.copy(), padded, past, past + bucket);
  attended_ = {rows_[row], tokens.prefix(past + n)};
  write(areas_.sidecar(), padded, past, past + bucket);
  const std::uint32_t applied = planted(kStaticCommitsTail) ? bucket : n;
  copy(areas_.sidecar(), area_of(row), past, past + applied,
       planted(kStaticAppliesAtZero) ? 0 : past);
  lengths_[row] = past + applied;
}

/// Calls for `n` tokens behind what the row's length says.
void StaticKvPolicy::forward(std::uint32_t row, const Tokens& tokens, std::uint32_t n) {
  const std::uint32_t begin = lengths_[row];
  for (std::uint32_t done = 0; done < n;) {
    const std::uint32_t from = planted(kStaticLiveLength) ? lengths_[row] : begin;
    const std::uint32_t past = from + done;
    if (past >= std::min(areas_.positions, tokens.size())) return;  // a defect's call
    const std::uint32_t left = std::min({n - done, areas_.positions - past, tokens.size() - past});
    const Cut cut = first_call(left, past, areas_.positions, planted(kStaticWrapsAround));
    call(row, tokens, past, cut.tokens, cut.bucket);
    done += cut.tokens;
  }
}

// --- Requests ------------------------------------------------------------------------------------

Result<Reply> StaticKvPolicy::admit(const Operation& operation) {
  const bool is_admitted = find(operation.id) != nullptr;
  if (const Result<void> sound = check_admission(operation, is_admitted); !sound)
    return tl::unexpected(sound.error());
  const std::uint32_t size = operation.tokens.size();
  if (operation.external > 0 || operation.room != Operation::kAbsent)
    return fail("admit: rows take no external tokens and keep no room");
  if (size > areas_.positions) return Reply::refusal(Refusal::too_long);
  const auto hole = std::find_if(rows_.begin(), rows_.end(), [](Name id) { return !id.exists(); });
  const auto row = static_cast<std::uint32_t>(hole - rows_.begin());
  if (row == areas_.rows) return Reply::refusal(Refusal::no_row);
  if (row == rows_.size()) {
    rows_.emplace_back();
    lengths_.push_back(0);
  } else {
    LOCKSTEP_MARK("static_kv.fills_hole");
  }
  rows_[row] = operation.id;
  if (!planted(kStaticOldLength)) lengths_[row] = 0;
  requests_.push_back({operation.id, operation.salt, operation.tokens, 0, {}});
  return Reply{}.set(ReplyField::cached, 0);
}

Result<Reply> StaticKvPolicy::extend(StaticKvRequest& request, const Operation& operation) {
  if (operation.async) return fail("extend: rows do not run ahead of results");
  const std::int64_t drafts = operation.drafts.size();
  const std::int64_t left =
      std::int64_t{request.known.size()} + operation.tokens.size() - request.computed + drafts;
  if (const Result<void> fits = check_extend(operation, left); !fits)
    return tl::unexpected(fits.error());
  if (request.computed + operation.n > areas_.positions) return Reply::refusal(Refusal::no_kv);
  request.known.append(operation.tokens);
  const std::uint32_t row = row_of(request);
  const auto n = static_cast<std::uint32_t>(operation.n);
  forward(row, request.known.followed_by(operation.drafts), n);
  request.drafts = operation.drafts;
  if (drafts == 0) request.computed += n;
  return Reply{}.set(ReplyField::n, operation.n);
}

/// What a verification has applied stays where it is; the row's length goes back to what is kept.
Result<Reply> StaticKvPolicy::accept(StaticKvRequest& request, const Operation& operation) {
  if (const Result<void> sound = check_accept(operation); !sound)
    return tl::unexpected(sound.error());
  const bool verified = !request.drafts.empty();
  if (verified)
    if (const Result<void> kept = check_kept(operation, request.drafts); !kept)
      return tl::unexpected(kept.error());
  request.known.append(operation.tokens);
  if (verified) {
    request.computed = request.known.size() - 1;
    if (!planted(kStaticKeepsRejected)) lengths_[row_of(request)] = request.computed;
    if (operation.tokens.size() <= request.drafts.size())
      LOCKSTEP_MARK("static_kv.takes_drafts_back");
  }
  request.drafts = Tokens();
  return Reply{}.set(ReplyField::n, operation.n);
}

void StaticKvPolicy::end(StaticKvRequest& request) {
  rows_[row_of(request)] = {};
  requests_.erase(requests_.begin() + (&request - requests_.data()));
}

// --- Captured prefixes ---------------------------------------------------------------------------

Result<Reply> StaticKvPolicy::capture(const StaticKvRequest& request, const Operation& operation) {
  if (request.computed == 0) return fail("capture: nothing is computed");
  auto found = std::find_if(captured_.begin(), captured_.end(),
                            [&](const StaticKvCaptured& one) { return one.name == operation.as; });
  if (found == captured_.end()) {
    if (captured_.size() == areas_.captures) return Reply::refusal(Refusal::no_state_slot);
    found = captured_.insert(captured_.end(), StaticKvCaptured{});
  }
  *found = {operation.as, request.salt, request.known.prefix(request.computed)};
  const auto place = static_cast<std::uint32_t>(found - captured_.begin());
  copy(area_of(row_of(request)), areas_.captured(place), 0, request.computed, 0);
  return Reply{}.set(ReplyField::length, request.computed);
}

Result<Reply> StaticKvPolicy::restore(StaticKvRequest& request, const Operation& operation) {
  const auto found =
      std::find_if(captured_.begin(), captured_.end(),
                   [&](const StaticKvCaptured& one) { return one.name == operation.from; });
  if (found == captured_.end())
    return fail(fmt::format("restore: nothing was captured as `{}`", operation.from.text()));
  const std::uint32_t size = found->tokens.size();
  if (request.computed > 0 || request.salt != found->salt || request.known.size() <= size ||
      request.known.prefix(size) != found->tokens)
    return fail("restore: not the beginning of a request that has computed nothing");
  const std::uint32_t row = row_of(request);
  copy(areas_.captured(static_cast<std::uint32_t>(found - captured_.begin())), area_of(row), 0,
       size - (planted(kStaticRestoresShort) ? 1 : 0), 0);
  lengths_[row] = request.computed = size;
  return Reply{}.set(ReplyField::cached, size);
}

// --- Reordering ----------------------------------------------------------------------------------

std::vector<RowUse> StaticKvPolicy::row_uses() {
  std::vector<RowUse> uses;
  for (const Name id : rows_)
    uses.push_back(!id.exists()               ? RowUse::hole
                   : find(id)->drafts.empty() ? RowUse::settled
                                              : RowUse::verifying);
  return uses;
}

/// Keys and values of every row, into the other tensor: what `reorder_cache` of a beam search does.
void StaticKvPolicy::reorder(const std::vector<std::int64_t>& mapping) {
  const bool in_place = planted(kStaticOrdersInPlace);
  const std::uint32_t from = reordered_ ? areas_.rows : 0;
  const std::uint32_t to = in_place ? from : areas_.rows - from;
  for (std::uint32_t i = 0; i < mapping.size(); ++i)
    if (mapping[i] >= 0)
      copy(from + i, to + static_cast<std::uint32_t>(mapping[i]), 0, lengths_[i], 0);
  if (!in_place) reordered_ = !reordered_;
}

Result<Reply> StaticKvPolicy::compact(const Operation& operation) {
  const std::vector<std::int64_t>& mapping = operation.mapping;
  const Result<std::uint32_t> kept = check_mapping(mapping, row_uses());
  if (!kept) return tl::unexpected(kept.error());
  reorder(mapping);
  std::vector<Name> rows(*kept);
  std::vector<std::uint32_t> lengths(lengths_.begin(), lengths_.begin() + *kept);
  for (std::size_t i = 0; i < mapping.size(); ++i) {
    if (mapping[i] < 0) continue;
    const auto to = static_cast<std::size_t>(mapping[i]);
    rows[to] = rows_[i];
    if (!planted(kStaticOrdersKvAlone)) lengths[to] = lengths_[i];
  }
  rows_.swap(rows);
  lengths_.swap(lengths);
  return Reply{};
}

// --- What is there -------------------------------------------------------------------------------

Reply StaticKvPolicy::check() const {
  std::int64_t used = 0;
  for (const StaticKvRequest& request : requests_) used += request.computed;
  return Reply{}
      .set(ReplyField::kv_free, std::int64_t{areas_.positions} * areas_.rows - used)
      .set(ReplyField::kv_locked, used);
}

std::optional<Snapshot> StaticKvPolicy::snapshot() const {
  Snapshot content;
  content.kv_total = content.kv_free = std::int64_t{areas_.positions} * areas_.rows;
  for (const StaticKvRequest& request : requests_) {
    const Tokens tokens = request.known.prefix(request.computed);
    content.nodes.push_back({-1, tokens.text(40), tokens.size(), false, true});
    content.kv_free -= request.computed;
  }
  for (const StaticKvCaptured& captured : captured_)
    content.nodes.push_back({-1, captured.tokens.text(40), captured.tokens.size(), false, false});
  return content;
}

namespace {

Result<void> check_config(const Config& config) {
  if (config.kv_tokens < config.rows())
    return fail(fmt::format("field kv_tokens: {} is less than one token for each of {}",
                            config.kv_tokens, counted(config.rows(), "row")));
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
     .config_fields = {ConfigField::state_slots},
     .make = [](const SubjectOptions& options) -> std::unique_ptr<Subject> {
       return std::make_unique<StaticKvPolicy>(options);
     },
     .check = check_config,
     .slots = [](const Config& config) -> PolicyEntry::SlotCounts {
       return {config.state_slots, StaticKvPolicy::areas_of(config).slots() + 1};
     },
     .has_tree_verbs = false,
     .has_slot_verbs = true}};

}  // namespace
}  // namespace lockstep::cache_sim
