#include "cache_sim/policies/sglang/pd/two_servers.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>
#include <optional>
#include <utility>

#include "cache_sim/policies/request_checks.hpp"
#include "reference/base/mark.hpp"
#include "reference/base/require.hpp"

namespace lockstep::cache_sim {
namespace {

/// The convolution runs over x, B and C side by side: of each slice of the heads, so many channels
/// are x's, B's and C's. A rank's page holds its x, then its B, then its C.
constexpr std::uint32_t kSegments[] = {2, 1, 1};
constexpr std::uint32_t kSliceChannels = 4;

/// The tensors of keys and values of a model of two layers, and of its draft model, in the order in
/// which a server lists them. The same tensor has the same number on both servers.
constexpr std::uint32_t kModelTensors[] = {0, 1, 2, 3}, kDraftTensors[] = {4, 5};

std::vector<std::uint32_t> tensors_of(bool drafts) {
  std::vector<std::uint32_t> list(std::begin(kModelTensors), std::end(kModelTensors));
  if (drafts) list.insert(list.end(), std::begin(kDraftTensors), std::end(kDraftTensors));
  return list;
}

/// The field draft_model; nothing where it names none.
std::optional<DraftModel> draft_model_of(const Config& config) {
  const auto* const name = std::ranges::find(kDraftModels, config.text("draft_model"));
  if (name == std::end(kDraftModels)) return std::nullopt;
  return static_cast<DraftModel>(name - std::begin(kDraftModels));
}

SubjectOptions with_config(SubjectOptions options, std::int64_t kv, std::int64_t states) {
  if (kv != 0) options.config.kv_tokens = kv;
  if (states != 0) options.config.state_slots = states;
  options.defect = nullptr;
  return options;
}

FirstSlots after_prefill(const Config& config) {
  return {static_cast<std::uint32_t>(config.kv_tokens + config.page),
          static_cast<std::uint32_t>(config.state_slots + 1)};
}

Operation operation_of(Verb verb) {
  return {.verb = verb};
}

/// The numbers of both replies, added up.
Reply sum(const Reply& one, const Reply& other) {
  Reply both;
  for (const ReplyField field :
       {ReplyField::kv, ReplyField::state, ReplyField::kv_free, ReplyField::kv_locked,
        ReplyField::states_free, ReplyField::states_locked})
    if (one.has(field) || other.has(field)) both.set(field, one.get(field) + other.get(field));
  return both;
}

}  // namespace

/// The slots are taken; what they get comes in copies.
void PdServer::receive(RadixRequest& request, std::uint32_t size) {
  require(receives_, "the prefill server computes its prompts");
  take_received_kv(request, size);
  request.computed = size;
  request.arrives = true;
}

TwoServers::TwoServers(const SubjectOptions& options)
    : config_(options.config),
      rules_(with_defect(PdRules{}, options.defect)),
      slices_(static_cast<std::uint32_t>(config_.number("slices"))),
      drafts_(draft_model_of(config_).value_or(DraftModel::none)),
      prefill_(with_config(options, 0, 0), FirstSlots{}, false),
      decode_(with_config(options, config_.number("decode_kv"), config_.number("decode_states")),
              after_prefill(config_), true) {}

Result<Reply> TwoServers::apply(const Operation& operation) {
  switch (operation.verb) {
    case Verb::admit: return admit(operation);
    case Verb::step:
      if (operation.padded != Operation::kAbsent)
        return fail("step: the batches of two servers have no rows of padding here");
      return ask(prefill_, operation).and_then([&](const Reply&) {
        return ask(decode_, operation);
      });
    case Verb::land:
    case Verb::fail: return end_copy(operation);
    case Verb::settle: return settle();
    case Verb::evict: return evict(operation);
    case Verb::flush: return flush();
    case Verb::check: return check();
    case Verb::extend:
    case Verb::accept:
    case Verb::checkpoint:
    case Verb::finish:
    case Verb::abort:
    case Verb::preempt:
    case Verb::complete:
    case Verb::load: return of_request(operation);
    default: break;
  }
  return fail(fmt::format("{} is not an operation of two servers", to_string(operation.verb)));
}

Result<Reply> TwoServers::ask(PdServer& server, const Operation& operation) {
  Result<Reply> reply = server.apply(operation);
  if (reply && watch_) watch_(&server == &decode_, operation, *reply);
  return reply;
}

// --- Requests ------------------------------------------------------------------------------------

/// The prefill server gets all tokens but the last one.
Result<Reply> TwoServers::admit(const Operation& operation) {
  const auto known = moving_.find(operation.id.index());
  const bool is_left = known != moving_.end() && known->second.stage == Stage::left;
  if (const Result<void> sound = check_admission(operation, known != moving_.end() && !is_left);
      !sound)
    return tl::unexpected(sound.error());
  const std::uint32_t size = operation.tokens.size();
  if (size < 2)
    return fail(
        "admit: the decode server computes the last token, and the prefill server needs "
        "one before it");
  if (is_left) return Reply::refusal(Refusal::same_step);  // its slots are still written
  if (size > decode_.config().kv_tokens) return Reply::refusal(Refusal::too_long);
  Operation first = operation;
  first.tokens = operation.tokens.prefix(size - 1);
  first.prompt = std::min<std::int64_t>(operation.prompt, size - 1);
  Result<Reply> reply = ask(prefill_, first);
  if (reply && reply->refused == Refusal::none) {
    MovingRequest& request = moving_[operation.id.index()];
    request = {};
    request.id = operation.id;
    request.salt = operation.salt;
    request.tokens = operation.tokens;
    request.prompt = operation.prompt;
  }
  return reply;
}

Result<Reply> TwoServers::of_request(const Operation& operation) {
  const auto known = moving_.find(operation.id.index());
  if (known == moving_.end() || known->second.stage == Stage::left)
    return no_such_request(operation);
  MovingRequest& request = known->second;
  if (operation.verb == Verb::abort || operation.verb == Verb::preempt || discards(operation))
    return leave(operation, request);
  switch (request.stage) {
    case Stage::decodes: {
      if (operation.verb == Verb::load)
        return fail("load: the decode server has the request already");
      Result<Reply> reply = ask(decode_, operation);
      if (reply && operation.verb == Verb::finish) moving_.erase(known);
      return reply;
    }
    case Stage::failed: return Reply::refusal(Refusal::same_step);
    default: break;
  }
  switch (operation.verb) {
    case Verb::extend: return extend(operation, request);
    case Verb::load: return load(operation, request);
    case Verb::checkpoint: return checkpoint(operation, request);
    case Verb::finish: {
      if (request.has_target) return Reply::refusal(Refusal::same_step);
      Result<Reply> reply = ask(prefill_, operation);
      if (reply) moving_.erase(known);
      return reply;
    }
    default: return ask(prefill_, operation);
  }
}

Result<Reply> TwoServers::extend(const Operation& operation, MovingRequest& request) {
  if (request.stage == Stage::is_sent) {
    if (!rules_.decode_waits) return ask(decode_, operation);
    return Reply::refusal(Refusal::same_step);
  }
  if (!operation.tokens.empty() || !operation.drafts.empty())
    return fail("extend: the prefill server computes the prompt alone");
  return ask(prefill_, operation);
}

/// Whether a copy in flight reads KV of the request's row that the tree does not own: to store the
/// row could free it.
bool TwoServers::is_read(const MovingRequest& request, const RadixRequest& source) const {
  return !request.copies.empty() && request.sent > source.owned;
}

Result<Reply> TwoServers::checkpoint(const Operation& operation, MovingRequest& request) {
  if (request.stage == Stage::is_sent || is_read(request, *prefill_.request(operation.id)))
    return Reply::refusal(Refusal::same_step);
  return ask(prefill_, operation);
}

/// The client leaves, or a request is put off. Nobody needs what its copies bring; slots that they
/// write are free when they have ended.
Result<Reply> TwoServers::leave(const Operation& operation, MovingRequest& request) {
  const Name id = operation.id;
  if (request.stage == Stage::decodes) {
    Result<Reply> reply = ask(decode_, operation);
    if (reply) moving_.erase(id.index());
    return reply;
  }
  abandon(request);
  if (request.has_source) end(prefill_, Verb::abort, id);
  request.has_source = false;
  if (request.has_target && (request.copies.empty() || !rules_.aborted_targets_wait)) {
    end(decode_, Verb::abort, id);
    request.has_target = false;
  }
  if (request.copies.empty())
    moving_.erase(id.index());
  else
    request.stage = Stage::left;
  return Reply{};
}

/// Asks one of the servers to end a request that it has.
void TwoServers::end(PdServer& server, Verb verb, Name id) {
  Operation operation{.verb = verb};
  operation.id = id;
  require(ask(server, operation).has_value(), "a server ends a request that it has");
}

// --- Transfers -----------------------------------------------------------------------------------

/// Sends what was computed since the last load; with the last tokens, the state.
Result<Reply> TwoServers::load(const Operation& operation, MovingRequest& request) {
  const Name id = operation.id;
  if (request.stage == Stage::is_sent) return Reply::refusal(Refusal::same_step);
  const auto store = [&] {
    Operation checkpoint{.verb = Verb::checkpoint};
    checkpoint.id = id;
    const RadixRequest& source = *prefill_.request(id);
    if (source.computed != 0 && !is_read(request, source)) (void)ask(prefill_, checkpoint);
  };
  const std::uint32_t last = request.tokens.size() - 1;
  Reply reply;
  if (rules_.stores_before_sending) store();
  if (!request.has_target)
    if (const Refusal refusal = take_target(id, request, reply); refusal != Refusal::none)
      return Reply::refusal(refusal);
  const bool is_last = prefill_.request(id)->computed == last;
  send(id, request, is_last, reply);
  if (!rules_.stores_before_sending) {
    Operation checkpoint{.verb = Verb::checkpoint};
    checkpoint.id = id;
    (void)ask(prefill_, checkpoint);
  }
  if (!is_last) return reply;
  request.stage = Stage::is_sent;
  if (rules_.source_waits) return reply;
  end(prefill_, Verb::finish, id);
  request.has_source = false;
  return reply;
}

/// The decode server takes a row, a state slot and KV slots for all tokens but the last.
Refusal TwoServers::take_target(Name id, MovingRequest& request, Reply& reply) {
  Operation admit{.verb = Verb::admit};
  admit.id = id;
  admit.salt = request.salt;
  admit.tokens = request.tokens;
  admit.prompt = request.prompt;
  admit.external = request.tokens.size() - 1;
  const Result<Reply> taken = ask(decode_, admit);
  require(taken.has_value(), "the decode server's names are those of requests that it has");
  if (taken->refused != Refusal::none) return taken->refused;
  const RadixRequest& target = *decode_.request(id);
  request.has_target = true;
  request.number = ++transfers_;
  request.target_begin = target.owned;
  for (const ReplyField field : {ReplyField::evicted_kv, ReplyField::evicted_states})
    reply.set(field, taken->get(field));
  return Refusal::none;
}

/// One copy for each slice of the KV that was not sent, and of the state.
void TwoServers::send(Name id, MovingRequest& request, bool with_state, Reply& reply) {
  RadixRequest& source = *prefill_.request(id);
  if (with_state && !rules_.keeps_last_token)
    prefill_.layers().advance_state(source.live, request.tokens, source.computed,
                                    request.tokens.size());
  RadixRequest& target = *decode_.request(id);
  const std::uint32_t end = source.computed;
  const std::uint32_t begin = std::max(request.sent, request.target_begin);
  const bool is_first = request.sent == 0;
  TierCopy whole;
  if (begin < end) {
    append_slice(whole.kv_sources, source.kv, begin, end);
    append_slice(whole.kv_targets, target.kv, begin, end);
  }
  whole.slices = slices_;
  whole.kv_tensors = kv_tensors();
  request.sent = std::max(request.sent, end);
  const bool has_kv = begin < end;
  for (std::uint32_t slice = 0; slice < slices_ && (has_kv || with_state); ++slice) {
    TierCopy copy = whole;
    copy.slice = slice;
    const bool leaves_early = !rules_.state_leaves_last && slice == 0;
    if (rules_.sends_state && (leaves_early ? is_first : with_state))
      copy.states.push_back({source.live, target.live});
    cut_conv(copy);
    prefill_.layers().queue_copy(copy);
    request.copies.push_back({++copies_, std::move(copy)});
  }
  LOCKSTEP_MARK("load.sends");
  reply.set(ReplyField::kv, has_kv ? end - begin : 0).set(ReplyField::state, with_state ? 1 : 0);
}

/// The channels of the conv state that belong to the copy's slice, from the prefill server's page,
/// which holds all of them, to where the decode server's rank of this slice has them. Both are told
/// by their numbers in the whole state.
void TwoServers::cut_conv(TierCopy& copy) const {
  copy.channels = kSliceChannels * slices_;
  std::uint32_t segment = 0, before = 0;
  for (const std::uint32_t size : kSegments) {
    const std::uint32_t own = segment + copy.slice * size;
    const std::uint32_t as_one = copy.slice * kSliceChannels + before;
    copy.conv.push_back({rules_.conv_in_segments ? own : as_one, own, size});
    segment += size * slices_;
    before += size;
  }
}

/// Tensors that both servers have. A draft model that the decode server alone has gets nothing.
std::vector<TierCopy::Channels> TwoServers::kv_tensors() const {
  const std::vector<std::uint32_t> sources = tensors_of(drafts_ == DraftModel::both);
  const std::vector<std::uint32_t> targets = tensors_of(drafts_ != DraftModel::none);
  std::vector<TierCopy::Channels> pairs;
  for (std::size_t i = 0; i < sources.size(); ++i) {
    const std::size_t half = sources.size() / 2;
    const std::uint32_t halved = targets[i < half ? i : targets.size() / 2 + (i - half)];
    pairs.push_back({sources[i], rules_.pairs_layers ? sources[i] : halved, 1});
  }
  return pairs;
}

void TwoServers::abandon(MovingRequest& request) {
  for (PdCopy& copy : request.copies) {
    if (std::exchange(copy.is_abandoned, true)) continue;
    prefill_.layers().abandon_copy(copy.slots);
    copy.slots.kv_sources.clear();
    for (TierCopy::States& pair : copy.slots.states) pair.source = StateSlot::none();
  }
}

/// The oldest copy, of all requests or of one, has landed or failed.
Result<Reply> TwoServers::end_copy(const Operation& operation) {
  const std::string verb(to_string(operation.verb));
  if (operation.tier.text() != "decode" || operation.rank != Operation::kAbsent ||
      (operation.from.exists() && operation.from.text() != "prefill"))
    return fail(verb + ": copies of two servers are those of tier=decode, from=prefill");
  MovingRequest* oldest = nullptr;
  for (auto& [name, request] : moving_) {
    if (request.copies.empty()) continue;
    if (operation.id.exists() && name != operation.id.index()) continue;
    if (oldest == nullptr || request.copies.front().id < oldest->copies.front().id)
      oldest = &request;
  }
  if (operation.id.exists() && !moving_.contains(operation.id.index()))
    return no_such_request(operation);
  if (oldest == nullptr) return Reply{}.set(ReplyField::n, 0);
  const PdCopy copy = std::move(oldest->copies.front());
  oldest->copies.pop_front();
  const bool fails = operation.verb == Verb::fail;
  if (fails || copy.is_abandoned)
    prefill_.layers().fail_copy(copy.slots);
  else
    prefill_.layers().land_copy(copy.slots);
  oldest->has_failed |= fails && !copy.is_abandoned && rules_.failure_ends_request;
  return Reply{}.set(ReplyField::n, 1);
}

/// Both servers look at the transfers, in the order in which they began. Returns how many have come
/// to an end.
Result<Reply> TwoServers::settle() {
  std::map<std::uint64_t, Name> order;
  for (const auto& [name, request] : moving_)
    if (request.has_target) order.emplace(request.number, request.id);
  std::int64_t ended = 0;
  for (const auto& [number, id] : order)
    if (conclude(id, moving_.at(id.index()))) ++ended;
  return Reply{}.set(ReplyField::n, ended);
}

/// Ends the transfer, or the wait for the copies of one that has ended; false where it goes on.
bool TwoServers::conclude(Name id, MovingRequest& request) {
  const auto give_up_source = [&] {
    if (std::exchange(request.has_source, false)) end(prefill_, Verb::finish, id);
  };
  const auto give_up_target = [&] {
    if (!request.copies.empty()) return false;
    if (std::exchange(request.has_target, false)) end(decode_, Verb::abort, id);
    if (request.stage == Stage::left) moving_.erase(id.index());
    return true;
  };
  if (request.stage == Stage::left || request.stage == Stage::failed) return give_up_target();
  if (std::exchange(request.has_failed, false)) {
    LOCKSTEP_MARK("settle.failed");
    abandon(request);
    give_up_source();
    request.stage = Stage::failed;
    give_up_target();
    return true;
  }
  if (request.stage != Stage::is_sent || !request.copies.empty()) return false;
  LOCKSTEP_MARK("settle.moved");
  give_up_source();
  request.stage = Stage::decodes;
  decode_.request(id)->arrives = false;
  return true;
}

// --- Both servers --------------------------------------------------------------------------------

Result<Reply> TwoServers::evict(const Operation& operation) {
  const std::string tier = operation.tier.exists() ? operation.tier.text() : "";
  if (!tier.empty() && tier != "prefill" && tier != "decode")
    return fail(fmt::format("evict: tier={} is neither prefill nor decode", tier));
  Operation own = operation;
  own.tier = Name();
  if (!tier.empty()) return ask(tier == "prefill" ? prefill_ : decode_, own);
  if (operation.room != Operation::kAbsent)
    return fail("evict: room= is one server's, which tier= names");
  return ask(prefill_, own).and_then([&](const Reply& first) {
    return ask(decode_, own).map([&](const Reply& second) { return sum(first, second); });
  });
}

/// All copies land and all transfers end; what no request uses is evicted.
Result<Reply> TwoServers::flush() {
  Operation land{.verb = Verb::land};
  land.tier = Name::intern("decode");
  while (end_copy(land)->get(ReplyField::n) != 0) continue;
  (void)settle();
  return ask(prefill_, operation_of(Verb::flush)).and_then([&](const Reply& first) {
    return ask(decode_, operation_of(Verb::flush)).map([&](const Reply& second) {
      return sum(first, second);
    });
  });
}

Result<Reply> TwoServers::check() {
  return ask(prefill_, operation_of(Verb::check)).and_then([&](const Reply& first) {
    return ask(decode_, operation_of(Verb::check)).map([&](const Reply& second) {
      return sum(first, second);
    });
  });
}

std::optional<Snapshot> TwoServers::snapshot() const {
  Snapshot both = *prefill_.snapshot();
  const Snapshot second = *decode_.snapshot();
  const int before = static_cast<int>(both.nodes.size());
  for (SnapshotNode node : second.nodes) {
    if (node.parent >= 0) node.parent += before;
    both.nodes.push_back(std::move(node));
  }
  both.kv_free += second.kv_free;
  both.kv_total += second.kv_total;
  both.states_free += second.states_free;
  both.states_total += second.states_total;
  return both;
}

namespace {

std::unique_ptr<Subject> make_two_servers(const SubjectOptions& options) {
  return std::make_unique<TwoServers>(options);
}

std::int64_t decode_kv(const Config& config) {
  const std::int64_t own = config.number("decode_kv");
  return own != 0 ? own : config.kv_tokens;
}

std::int64_t decode_states(const Config& config) {
  const std::int64_t own = config.number("decode_states");
  return own != 0 ? own : config.state_slots;
}

PolicyEntry::SlotCounts slots_of_both(const Config& config) {
  return {config.state_slots + decode_states(config),
          config.kv_tokens + config.page + decode_kv(config)};
}

Result<void> check_draft_model(const Config& config) {
  if (draft_model_of(config)) return {};
  return fail(fmt::format("field draft_model: `{}` is none of {}",
                          config.text("draft_model").substr(0, 60), fmt::join(kDraftModels, ", ")));
}

const Registration<PolicyEntry> kTwoServers{
    {.name = "sglang-pd",
     .summary = "SGLang 0.5.23's prefill and decode apart: two servers of sglang-no-buffer",
     .has_states = true,
     .config_fields = {"decode_kv", "decode_states", "slices", "draft_model"},
     .make = make_two_servers,
     .check = check_draft_model,
     .slots = slots_of_both,
     .capabilities = {Capability::tiers, Capability::disaggregation}}};

const Registration<ConfigOption> kOptions{
    {.name = "decode_kv", .otherwise = "0", .number = {{0, std::int64_t{1} << 30}}},
    {.name = "decode_states", .otherwise = "0", .number = {{0, std::int64_t{1} << 24}}},
    {.name = "draft_model", .otherwise = kDraftModels[0]},
    {.name = "slices", .otherwise = "1", .number = {{1, 8}}}};

}  // namespace
}  // namespace lockstep::cache_sim
