#include "cache_sim/policies/marconi/marconi_policy.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "cache_sim/policies/marconi/marconi_options.hpp"
#include "cache_sim/policies/request_checks.hpp"
#include "reference/base/counted.hpp"
#include "reference/base/mark.hpp"
#include "reference/base/require.hpp"

namespace lockstep::cache_sim {
namespace {

constexpr std::int64_t kEverything = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kMostBytes = std::int64_t{1} << 31;  // of a token, of a state
constexpr std::int64_t kMostSlots = std::int64_t{1} << 30;  // KV slots are indexed by 32 bits

// The paper's hybrid model of 7 billion weights, width 4096, states of 128, everything in 16 bits.
constexpr std::int64_t kAttentionLayers = 4, kSsmLayers = 24, kMlpLayers = 28;
constexpr std::int64_t kWidth = 4096, kStateSize = 128;
constexpr std::int64_t kPaperTokenBytes = kAttentionLayers * 4 * kWidth;
constexpr std::int64_t kPaperStateBytes =
    kSsmLayers * (2 * kWidth * kStateSize + 8 * (2 * kWidth + 2 * kStateSize));

MarconiCosts costs_of(const MarconiOptions& options, const MarconiSizes& sizes) {
  constexpr auto d = static_cast<double>(kWidth);
  constexpr auto n = static_cast<double>(kStateSize);
  constexpr MarconiCosts::Flops kAttention{8 * d * d, 4 * d};
  constexpr double kMlp = 16 * d * d;
  constexpr double kSsm = 12 * d * d + 16 * d * n + 10 * d;
  MarconiCosts costs{.token_bytes = sizes.token_bytes, .state_bytes = sizes.state_bytes};
  costs.flops = {kAttentionLayers * kAttention.a + kMlpLayers * kMlp + kSsmLayers * kSsm,
                 kAttentionLayers * kAttention.b};
  if (options.flops_token != 0 || options.flops_pair != 0) {
    // Token i sees i + 1 tokens: their sum over L tokens is L (L + 1) / 2.
    const double half_pair = static_cast<double>(options.flops_pair) / 2;
    costs.flops = {static_cast<double>(options.flops_token) + half_pair, half_pair};
  }
  costs.mlp_as_attention = {costs.flops.a + kMlpLayers * (kAttention.a - kMlp),
                            costs.flops.b + kMlpLayers * kAttention.b};
  return costs;
}

}  // namespace

MarconiSizes MarconiSizes::of(const Config& config) {
  const MarconiOptions options = MarconiOptions::of(config);
  MarconiSizes sizes{options.token_bytes == 0 ? kPaperTokenBytes : options.token_bytes,
                     options.state_bytes == 0 ? kPaperStateBytes : options.state_bytes,
                     config.pool_bytes};
  if (sizes.capacity == 0)
    sizes.capacity = config.kv_tokens * sizes.token_bytes + config.state_slots * sizes.state_bytes;
  return sizes;
}

MarconiPolicy::MarconiPolicy(const SubjectOptions& options, const MarconiRules& variant)
    : config_(options.config),
      rules_(with_defect(variant, options.defect)),
      layers_(*options.layers),
      sizes_(MarconiSizes::of(config_)),
      kv_(sizes_.capacity / sizes_.token_bytes, 1, layers_),
      states_(sizes_.capacity / sizes_.state_bytes, layers_),
      tree_(costs_of(MarconiOptions::of(config_), sizes_), this, variant, rules_),
      tuner_(MarconiOptions::of(config_), sizes_.capacity, rules_) {}

Result<Reply> MarconiPolicy::apply(const Operation& operation) {
  switch (operation.verb) {
    case Verb::admit: return admit(operation);
    case Verb::step: layers_.launch({}); return Reply{};
    case Verb::evict:
      if (operation.room != Operation::kAbsent) return fail("evict: Marconi keeps no room");
      return evict(std::max<std::int64_t>(operation.kv, 0),
                   std::max<std::int64_t>(operation.state, 0));
    case Verb::flush: return evict(kEverything, kEverything);
    case Verb::check: return check();
    case Verb::extend:
    case Verb::accept:
    case Verb::checkpoint:
    case Verb::finish:
    case Verb::abort:
    case Verb::preempt: break;
    default:
      return fail(fmt::format("{} is not an operation of Marconi", to_string(operation.verb)));
  }
  MarconiRequest* const request = find(operation.id);
  if (request == nullptr) return no_such_request(operation);
  if (discards(operation)) {
    remove(*request);
    return Reply{};
  }
  if (operation.verb == Verb::accept) return accept(*request, operation);
  if (const Result<void> settled = check_is_settled(operation, request->verifying); !settled)
    return tl::unexpected(settled.error());
  if (operation.verb == Verb::extend) return extend(*request, operation);
  if (operation.verb == Verb::finish) return finish(*request);
  if (operation.up_to > request->computed)
    return fail(fmt::format("checkpoint: up_to={} is beyond the {}", operation.up_to,
                            counted(request->computed, "computed token")));
  return Reply{}.set(ReplyField::exist, 0).set(ReplyField::length, request->owned);
}

MarconiRequest* MarconiPolicy::find(Name id) {
  if (id.index() >= place_of_.size() || place_of_[id.index()] == 0) return nullptr;
  return &requests_[place_of_[id.index()] - 1];
}

// --- The pool ------------------------------------------------------------------------------------

std::int64_t MarconiPolicy::free_bytes() const {
  return sizes_.capacity - tree_.bytes() - own_tokens_ * sizes_.token_bytes -
         running_ * sizes_.state_bytes;
}

bool MarconiPolicy::evict_one(MarconiTree::Evicted& evicted) {
  if (tree_.has_candidate() && tuner_.wants_snapshot()) tuner_.evicted(tree_.counting_copy());
  return tree_.evict_one(tuner_.alpha(), evicted);
}

/// Evicts until so many bytes are free; evicts nothing where that is not possible.
bool MarconiPolicy::make_room(std::int64_t bytes, MarconiTree::Evicted& evicted) {
  if (!would_fit(bytes)) return false;
  while (free_bytes() < bytes)
    if (!evict_one(evicted)) return false;
  return true;
}

// --- Requests ------------------------------------------------------------------------------------

Result<Reply> MarconiPolicy::admit(const Operation& operation) {
  const bool is_admitted = find(operation.id) != nullptr;
  if (const Result<void> sound = check_admission(operation, is_admitted); !sound)
    return tl::unexpected(sound.error());
  const std::uint32_t size = operation.tokens.size();
  if (operation.external > 0) return fail("admit: Marconi takes no external tokens");
  if (operation.room != Operation::kAbsent) return fail("admit: Marconi keeps no room");
  if (size * sizes_.token_bytes + sizes_.state_bytes > sizes_.capacity)
    return Reply::refusal(Refusal::too_long);
  if (running_ == config_.rows()) return Reply::refusal(Refusal::no_row);

  const MarconiTree::Match match = tree_.match(operation.tokens, size - 1, operation.salt);
  tree_.lock(match.node);
  const std::int64_t rest = (size - match.prefix) * sizes_.token_bytes;
  const bool fits_state = would_fit(sizes_.state_bytes);
  if (!fits_state || !would_fit(sizes_.state_bytes + rest)) {
    tree_.unlock(match.node);
    return Reply::refusal(fits_state ? Refusal::no_kv : Refusal::no_state_slot);
  }
  MarconiTree::Evicted evicted;
  make_room(sizes_.state_bytes, evicted);

  MarconiRequest request{.id = operation.id, .salt = operation.salt, .known = operation.tokens};
  request.admitted = size;
  request.computed = request.allocated = request.owned = match.prefix;
  request.branch = match.full > match.prefix ? match.full : 0;
  request.used = match.node;
  start_state(request, match);

  Reply reply;
  const LayerState::Lengths lengths = layers_.state_lengths(request.live, match.prefix);
  reply.set(ReplyField::cached, match.prefix)
      .set(ReplyField::state, lengths.recurrent)
      .set(ReplyField::conv, lengths.conv)
      .set(ReplyField::junction, request.branch)
      .set(ReplyField::evicted_kv, evicted.kv)
      .set(ReplyField::evicted_states, evicted.states);
  if (free_places_.empty()) {
    free_places_.push_back(static_cast<std::uint32_t>(requests_.size()));
    requests_.emplace_back();
  }
  const std::uint32_t place = free_places_.back();
  free_places_.pop_back();
  if (place_of_.size() <= operation.id.index()) place_of_.resize(operation.id.index() + 1);
  place_of_[operation.id.index()] = place + 1;
  requests_[place] = std::move(request);
  return reply;
}

/// Gives the request its own state: a copy of the matched one, or the state of the empty prefix.
/// Its row begins with the tree's KV.
void MarconiPolicy::start_state(MarconiRequest& request, const MarconiTree::Match& match) {
  ++running_;
  request.live = states_.allocate();
  if (match.node == MarconiTree::kRoot) return layers_.zero_state(request.live);
  const StateSlot matched = tree_.node(match.node).state;
  if (!rules_.match_copies_conv)
    layers_.copy_state(matched, request.live, StatePart::recurrent);
  else
    layers_.copy_state(matched, request.live);
  scratch_.clear();
  tree_.append_path_kv(match.node, scratch_);
  append_slice(request.kv, scratch_, 0, match.prefix);
}

/// Computes tokens[computed, allocated). Where they pass the branch, the row leaves the state there
/// in a slot of its own, which then goes into the tree.
void MarconiPolicy::run(MarconiRequest& request, MarconiTree::Evicted& evicted) {
  const std::uint32_t begin = request.computed;
  const std::uint32_t stop = request.allocated;
  const bool passes_branch = begin < request.branch && request.branch <= stop;
  StateTake take{rules_.takes_branch_at_chunk_end ? stop : request.branch, StateSlot::none()};
  if (passes_branch && rules_.stores_branches && make_room(sizes_.state_bytes, evicted))
    take.target = states_.allocate();
  ForwardRow row{.request = request.id,
                 .tokens = request.known,
                 .begin = begin,
                 .end = stop,
                 .state = request.live,
                 .kv = request.kv};
  if (take.target.exists()) row.takes = {&take, 1};
  layers_.forward(row);
  request.computed = stop;
  if (take.target.exists()) store_branch(request, take.target);
}

/// Leaves the live state as it is and, beside it, the state after each of the row's tokens.
void MarconiPolicy::verify(MarconiRequest& request, const Tokens& drafts) {
  request.verifying = true;
  request.drafts = drafts;
  const Tokens tokens = request.known.followed_by(drafts);
  layers_.forward({.request = request.id,
                   .tokens = tokens,
                   .begin = request.computed,
                   .end = request.allocated,
                   .drafts = drafts.size(),
                   .state = request.live,
                   .keeps = kNoParts,
                   .kv = request.kv});
}

Result<Reply> MarconiPolicy::extend(MarconiRequest& request, const Operation& operation) {
  if (operation.async) return fail("extend: Marconi does not run ahead of results");
  const std::int64_t drafts = operation.drafts.size();
  const std::int64_t left =
      std::int64_t{request.known.size()} + operation.tokens.size() - request.computed + drafts;
  if (const Result<void> fits = check_extend(operation, left); !fits)
    return tl::unexpected(fits.error());
  MarconiTree::Evicted evicted;
  if (!make_room(operation.n * sizes_.token_bytes, evicted)) return Reply::refusal(Refusal::no_kv);
  const auto count = static_cast<std::uint32_t>(operation.n);
  kv_.allocate(count, request.kv, request.kv_tail);
  request.allocated += count;
  own_tokens_ += count;
  request.known.append(operation.tokens);
  if (drafts != 0)
    verify(request, operation.drafts);
  else
    run(request, evicted);
  return Reply{}
      .set(ReplyField::n, operation.n)
      .set(ReplyField::evicted_kv, evicted.kv)
      .set(ReplyField::evicted_states, evicted.states);
}

/// The tree gets the copy of the state at the branch.
void MarconiPolicy::store_branch(MarconiRequest& request, StateSlot copy) {
  LOCKSTEP_MARK("marconi.branch");
  if (!store(request, request.branch, copy)) return;
  LOCKSTEP_MARK("marconi.branch_exists");
  if (rules_.frees_refused_branch) states_.release(copy);
}

/// Inserts the request's first `size` tokens with the state, and uses them from there. True where
/// the tree has a state for them, so that the caller keeps its own.
bool MarconiPolicy::store(MarconiRequest& request, std::uint32_t size, StateSlot state) {
  const MarconiTree::Inserted done =
      tree_.insert(request.known, size, request.salt, &request.kv, state);
  own_tokens_ -= size - request.owned;
  if (done.stored > request.owned) {  // KV that the tree had already
    KvRuns duplicates;
    append_slice(duplicates, request.kv, request.owned, done.stored);
    kv_.release(duplicates);
    scratch_.clear();
    tree_.append_path_kv(done.end, scratch_);
    append_slice(scratch_, request.kv, size, request.allocated);
    request.kv.swap(scratch_);
  }
  request.owned = size;
  use(request, done.end);
  return done.exist;
}

/// Locks the new node before it unlocks the old one, so that their common path stays locked.
void MarconiPolicy::use(MarconiRequest& request, MarconiTree::Index node) {
  tree_.lock(node);
  tree_.unlock(request.used);
  request.used = node;
}

/// The tokens kept of a verification: drafts, whose KV is there already, and the one sampled
/// after them.
Result<Reply> MarconiPolicy::accept(MarconiRequest& request, const Operation& operation) {
  if (const Result<void> sound = check_accept(operation); !sound)
    return tl::unexpected(sound.error());
  if (!request.verifying) {
    request.known.append(operation.tokens);
    return Reply{}.set(ReplyField::n, operation.n);
  }
  if (const Result<void> kept = check_kept(operation, request.drafts); !kept)
    return tl::unexpected(kept.error());
  request.known.append(operation.tokens);
  const std::uint32_t stop = request.known.size() - 1;
  if (stop > request.computed)  // otherwise a row without known tokens, of which no draft is kept
    for (const StatePart part : kStateParts)
      layers_.commit_state(request.live, stop - request.computed - 1, request.live, part);
  request.computed = stop;
  request.verifying = false;
  request.drafts = Tokens();
  drop_kv(request, request.computed);
  return Reply{}.set(ReplyField::n, operation.n);
}

Reply MarconiPolicy::finish(MarconiRequest& request) {
  const std::uint32_t size = request.computed;
  bool exist = true;
  if (size > 0) {
    exist = store(request, size, request.live);
    if (!exist) request.live = StateSlot::none();  // the tree's
  }
  const Tokens known = request.known;
  const std::uint32_t admitted = request.admitted;
  const Name salt = request.salt;
  remove(request);
  tuner_.finished(tree_, known.prefix(admitted), known.prefix(size), salt);
  return Reply{}.set(ReplyField::exist, exist ? 1 : 0).set(ReplyField::length, size);
}

/// Gives back the KV of the request's own tokens from the `first` one on.
void MarconiPolicy::drop_kv(MarconiRequest& request, std::uint32_t first) {
  own_tokens_ -= request.allocated - first;
  kv_.release_from(request.kv, first);
  request.allocated = first;
}

void MarconiPolicy::remove(MarconiRequest& request) {
  drop_kv(request, request.owned);
  if (request.live.exists()) states_.release(request.live);
  --running_;
  tree_.unlock(request.used);
  const std::uint32_t place = place_of_[request.id.index()] - 1;
  place_of_[request.id.index()] = 0;
  free_places_.push_back(place);
  request = MarconiRequest{};
}

Reply MarconiPolicy::evict(std::int64_t kv, std::int64_t states) {
  MarconiTree::Evicted evicted;
  while ((evicted.kv < kv || evicted.states < states) && evict_one(evicted)) {
  }
  return Reply{}.set(ReplyField::kv, evicted.kv).set(ReplyField::state, evicted.states);
}

Reply MarconiPolicy::check() const {
  return Reply{}
      .set(ReplyField::kv_free, free_bytes() / sizes_.token_bytes)
      .set(ReplyField::states_free, free_bytes() / sizes_.state_bytes)
      .set(ReplyField::kv_locked, tree_.locked_tokens())
      .set(ReplyField::states_locked, tree_.locked_states());
}

/// Nodes by depth: parents come before their children. Slots are those of the two kinds that are
/// numbered, whatever bytes the other kind has taken.
std::optional<Snapshot> MarconiPolicy::snapshot() const {
  Snapshot content;
  content.kv_free = kv_.free_count();
  content.kv_total = kv_.slot_count();
  content.states_free = states_.free_count();
  content.states_total = states_.slot_count();
  std::vector<MarconiTree::Index> order;
  for (MarconiTree::Index i = 1; i < tree_.node_count(); ++i)
    if (tree_.node(i).alive) order.push_back(i);
  std::ranges::stable_sort(order,
                           [&](auto a, auto b) { return tree_.node(a).end < tree_.node(b).end; });
  std::vector<int> place(tree_.node_count(), -1);
  for (const MarconiTree::Index i : order) {
    const MarconiTree::Node& node = tree_.node(i);
    place[i] = static_cast<int>(content.nodes.size());
    content.nodes.push_back({place[node.parent], node.path.slice(node.begin, node.end).text(40),
                             node.end, node.has_state, node.locks != 0,
                             node.path.prefix(node.end).text(40)});
  }
  return content;
}

namespace {

Result<void> check_config(const Config& config) {
  const MarconiOptions options = MarconiOptions::of(config);
  if (options.token_bytes > kMostBytes)
    return fail(fmt::format("field token_bytes: {} is above {}", options.token_bytes, kMostBytes));
  if (options.state_bytes > kMostBytes)
    return fail(fmt::format("field state_bytes: {} is above {}", options.state_bytes, kMostBytes));
  const MarconiSizes sizes = MarconiSizes::of(config);
  if (sizes.capacity / sizes.token_bytes > kMostSlots)
    return fail(fmt::format("field pool_bytes: {} tokens of KV are more than {}",
                            sizes.capacity / sizes.token_bytes, kMostSlots));
  if (options.alpha == "tuned") return {};
  return parse_integer(options.alpha, 0, 1'000'000)
      .map([](std::int64_t) {})
      .map_error([](const Error& error) {
        return Error{.text = "field alpha: neither `tuned` nor per mille: " + error.text};
      });
}

PolicyEntry::SlotCounts slots_of(const Config& config) {
  const MarconiSizes sizes = MarconiSizes::of(config);
  return {sizes.capacity / sizes.state_bytes, sizes.capacity / sizes.token_bytes + 1};
}

constexpr MarconiRules kArtifactRules{
    .takes_mlp_for_attention = true, .divides_by_whole_prefix = true, .insert_matches = true};

const Registration<PolicyEntry> kMarconi{
    {.name = "marconi",
     .summary = "Marconi (MLSys 2025): states at ends and branches, eviction by FLOPs per byte",
     .has_states = true,
     .config_fields = {"pool_bytes", "token_bytes", "state_bytes", "alpha", "bootstrap",
                       "flops_token", "flops_pair"},
     .make = [](const SubjectOptions& options) -> std::unique_ptr<Subject> {
       return std::make_unique<MarconiPolicy>(options, MarconiRules{});
     },
     .check = check_config,
     .slots = slots_of,
     .tells_forwards = true}};
const Registration<PolicyEntry> kArtifact{
    {.name = "marconi-artifact",
     .summary = "Marconi with the accounting of its published simulator",
     .has_states = true,
     .config_fields = {"pool_bytes", "token_bytes", "state_bytes", "alpha", "bootstrap"},
     .make = [](const SubjectOptions& options) -> std::unique_ptr<Subject> {
       return std::make_unique<MarconiPolicy>(options, kArtifactRules);
     },
     .check = check_config,
     .slots = slots_of,
     .tells_forwards = true}};

}  // namespace
}  // namespace lockstep::cache_sim
