#include "cache_sim/compare/compare.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>

#include "cache_sim/base/settings.hpp"
#include "cache_sim/compare/state_ledger.hpp"
#include "cache_sim/model/pool_layout.hpp"
#include "cache_sim/replay/replay.hpp"
#include "cache_sim/replay/run_json.hpp"
#include "reference/base/work_done.hpp"
#include "reference/protocol/config.hpp"
#include "reference/protocol/host_tier.hpp"
#include "reference/protocol/near_word.hpp"

namespace lockstep::cache_sim {
namespace {

TimeSummary summary_of(std::vector<Nanoseconds> times) {
  if (times.empty()) return {};
  std::ranges::sort(times);
  const auto count = static_cast<Nanoseconds>(times.size());
  // sum / count, computed without the sum, which may not fit 64 bits.
  Nanoseconds mean = 0, rest = 0;
  for (const Nanoseconds time : times) {
    mean += time / count;
    rest += time % count;
  }
  // The least time that so many per cent of them do not exceed.
  const auto at = [&](std::size_t percent) {
    return times[(times.size() * percent + 99) / 100 - 1];
  };
  return {.mean = mean + rest / count, .median = at(50), .p99 = at(99)};
}

/// The words of a comma-separated list, without empty ones.
std::vector<std::string> words_of(std::string_view list) {
  std::vector<std::string> words;
  while (!list.empty()) {
    const std::string_view word = list.substr(0, list.find(','));
    list.remove_prefix(std::min(word.size() + 1, list.size()));
    if (!word.empty()) words.emplace_back(word);
  }
  return words;
}

// --- Policies behind the scheduler ---------------------------------------------------------------

/// A policy by the word `NAME@K=V@K=V`: a registered policy and config fields of its own, as
/// K=V,K=V.
struct NamedPolicy {
  const PolicyEntry* entry;
  std::string settings;

  static NamedPolicy of(std::string_view text) {
    const std::size_t end = std::min(text.find('@'), text.size());
    NamedPolicy named{Registry<PolicyEntry>::find(text.substr(0, end)),
                      std::string(text.substr(std::min(end + 1, text.size())))};
    std::ranges::replace(named.settings, '@', ',');
    return named;
  }
};

/// Of a policy's own settings: per mille of the host tier's bytes for states.
constexpr std::string_view kHostShare = "host_share";
constexpr std::string_view kBestAlpha = "alpha=best";
constexpr int kAlphas = 21;  // 0, 0.1, … 2

/// A pool of KV and a pool of states; the field state_share divides the bytes between them.
bool has_two_pools(const PolicyEntry* policy) {
  return policy != nullptr && policy->has_states && pool_layout_of(*policy) == nullptr;
}

/// The requests of a row, each of which is added as it ends.
struct Requests {
  explicit Requests(const Model& model) : model_(model) {}

  void add(const RequestOutcome& request) {
    ++count;
    output_tokens += request.output_tokens;
    first = std::min(first, request.arrival);
    last = std::max(last, request.end);
    refused += request.finish == FinishReason::refused ? 1 : 0;
    if (request.cached_tokens < 0) unserved_tokens += request.prompt_tokens;
    const std::int64_t hit = std::max<std::int64_t>(request.cached_tokens, 0);
    hits += hit > 0 ? 1 : 0;
    flops_saved += model_.prefill_flops(hit);
    if (request.first_token < 0) return;
    ttft.push_back(request.first_token - request.arrival);
    if (request.end >= 0) e2e.push_back(request.end - request.arrival);
  }

  std::int64_t count = 0, hits = 0, refused = 0, output_tokens = 0;
  std::int64_t unserved_tokens = 0;  // of prompts that were never admitted
  double flops_saved = 0;
  Nanoseconds first = std::numeric_limits<Nanoseconds>::max(), last = 0;
  std::vector<Nanoseconds> ttft, e2e;

 private:
  const Model& model_;
};

class Comparer {
 public:
  Comparer(const CompareRequest& request, const Model& model) : request_(request), model_(model) {}

  Result<Comparison> run() {
    if (const Result<void> set = config_.set_all(request_.config); !set)
      return fail("--config: " + set.error().text);
    if (request_.policies.empty()) return fail("--policies names no policy");
    if (const Result<void> read = read_cost(); !read) return tl::unexpected(read.error());
    if (const Result<void> planned = plan(); !planned) return tl::unexpected(planned.error());
    if (const Result<void> done = run_ideal(); !done) return tl::unexpected(done.error());
    for (ComparedPolicy& row : rows_)
      if (row.scheduled)
        if (const Result<void> done = run_scheduled(row); !done)
          return tl::unexpected(done.error());
    return Comparison{.policies = std::move(rows_),
                      .model = model_,
                      .by_host = request_.hosts.size() > 1,
                      .block = block_,
                      .measured = measured_};
  }

 private:
  /// Reads the times of `measured:CARD`.
  Result<void> read_cost() {
    constexpr std::string_view kMeasured = "measured:";
    if (request_.cost == kModelCost) {
      if (request_.evidence == CompareRequest().evidence) return {};
      return fail(fmt::format("--evidence: it has no effect without --cost {}CARD", kMeasured));
    }
    if (!request_.cost.starts_with(kMeasured))
      return fail(fmt::format("--cost: `{}` is neither `{}` nor `{}CARD`", request_.cost,
                              kModelCost, kMeasured));
    return MeasuredLayers::read(model_, request_.cost.substr(kMeasured.size()), request_.evidence)
        .map([&](MeasuredLayers layers) {
          measured_ = std::make_shared<const MeasuredLayers>(std::move(layers));
        });
  }

  /// The config of a policy: --config, and over it the policy's own settings.
  Result<Config> config_of(const std::string& name) const {
    Config config = config_;
    const std::string own = settings_without(NamedPolicy::of(name).settings, {kHostShare, "alpha"});
    if (const Result<void> set = config.set_all(own); !set)
      return fail(fmt::format("policy {}: {}", name, set.error().text));
    return config;
  }

  /// An error where two options say the same of a policy.
  Result<void> expect_one_answer(const std::string& name) const {
    const ConfigFields set = fields_of({request_.config, NamedPolicy::of(name).settings});
    const auto both = [&](std::string_view field, std::string_view option) {
      return fail(
          fmt::format("{}: {}= of --config or policy {} says the same", option, field, name));
    };
    for (const std::string_view field : {std::string_view("policy"), kFidelityField, kModelField})
      if (set.contains(field))
        return fail(
            fmt::format("policy {}: field {}: it has no effect in a comparison, which "
                        "checks nothing and has --policies",
                        name, field));
    if (request_.cost != kModelCost && set.contains("step_time"))
      return both("step_time", "--cost");
    if (request_.capacities.empty()) return {};
    for (const char* const pool : {"kv_tokens", "state_slots", "blocks", "pool_bytes"})
      if (set.contains(pool)) return both(pool, "--capacity");
    return {};
  }

  /// Makes a row for each policy at each of its capacities, in the order of the request.
  Result<void> plan() {
    if (request_.hosts.size() > 1 && request_.capacities.size() > 1)
      return fail("--host: several sizes go with one --capacity");
    for (const std::string& name : request_.policies) {
      if (Result<void> one = expect_one_answer(name); !one) return one;
      const Result<std::optional<FoundIdeal>> ideal = find_ideal(name);
      if (!ideal) return tl::unexpected(ideal.error());
      if (*ideal && !(*ideal)->entry->has_capacity) {
        rows_.push_back({.policy = name});
        continue;
      }
      const PolicyEntry* const policy = NamedPolicy::of(name).entry;
      if (!*ideal && policy == nullptr)
        return fail(fmt::format("there is no policy `{}`{}; `lockstep list policies` shows all",
                                name.substr(0, 60),
                                but_near(name, names_in(Registry<PolicyEntry>::all()))));
      if (policy != nullptr && policy->has_states && model_.state_bytes == 0)
        return fail(fmt::format("model {} has no recurrent state, which policy {} is about",
                                model_.name, name));
      if (request_.capacities.empty()) {
        Result<void> added = config_of(name).and_then(
            [&](const Config& config) { return add(counted_row(name, policy, config), policy); });
        if (!added) return added;
      }
      for (const auto& capacity : request_.capacities) {
        Result<void> added = row_of(name, policy, capacity).and_then([&](ComparedPolicy row) {
          return add(std::move(row), policy);
        });
        if (!added) return added;
      }
    }
    return {};
  }

  /// Adds the row, once for each host tier where the policy may have one.
  Result<void> add(ComparedPolicy row, const PolicyEntry* policy) {
    const std::string own = NamedPolicy::of(row.policy).settings;
    const bool takes = policy != nullptr && takes_host_tier(policy->config_fields) &&
                       !takes_host_tier(fields_of({request_.config, own}));
    if (!takes || request_.hosts.empty()) {
      if (fields_of({own}).contains(kHostShare))
        return fail(fmt::format("policy {}: host_share= divides what --host gives", row.policy));
      rows_.push_back(std::move(row));
      return {};
    }
    for (const std::int64_t bytes : request_.hosts) {
      row.host_bytes = bytes;
      if (Result<void> fits = divide_host(row); !fits) return fits;
      rows_.push_back(row);
    }
    return {};
  }

  /// Divides the bytes of a row's host tier, of which states get host_share.
  Result<void> divide_host(ComparedPolicy& row) const {
    std::string text;
    const NamedPolicy policy = NamedPolicy::of(row.policy);
    const std::string own = settings_without(policy.settings, {kHostShare}, &text);
    if (const PoolLayout* const layout = pool_layout_of(*policy.entry)) {
      if (!text.empty())
        return fail(
            fmt::format("policy {}: its host tier is one pool for KV and states, which "
                        "host_share cannot divide",
                        row.policy));
      const Result<PoolLayout::Host> host = host_of(*layout, *policy.entry, own, row);
      if (!host) return fail(fmt::format("policy {}: --host: {}", row.policy, host.error().text));
      row.host = {.kv_tokens = host->kv_tokens, .state_slots = host->state_slots};
      return {};
    }
    std::int64_t share = kDefaultStateShare;
    if (!text.empty()) {
      const Result<std::int64_t> given = parse_integer(text.substr(text.find('=') + 1), 1, 999);
      if (!given) return fail(fmt::format("policy {}: {}", row.policy, given.error().text));
      share = *given;
    }
    const Slots slots = divided(*row.host_bytes, share);
    if (slots.states == 0 || slots.kv == 0)
      return fail(fmt::format("policy {}: --host: {} bytes have no room for one {} of model {}",
                              row.policy, *row.host_bytes,
                              slots.states == 0 ? "state" : "token of KV", model_.name));
    row.host = {.kv_tokens = slots.kv, .state_slots = slots.states};
    return {};
  }

  /// The host tier of a policy whose family has a layout of its own, in row.host_bytes.
  Result<PoolLayout::Host> host_of(const PoolLayout& layout, const PolicyEntry& policy,
                                   const std::string& own, const ComparedPolicy& row) const {
    if (row.blocks == 0) return fail("the bytes of a block are known with a --capacity alone");
    Config config = config_;
    if (const Result<void> set = config.set_all(own); !set) return tl::unexpected(set.error());
    return layout.host(memory_of(policy, *row.host_bytes), config);
  }

  /// The memory that the layout of a policy divides.
  PoolMemory memory_of(const PolicyEntry& policy, std::int64_t bytes,
                       ConfigFields fixed = {}) const {
    return {policy, model_, bytes, config_.page, std::move(fixed)};
  }

  /// A row whose pools are those of its config.
  ComparedPolicy counted_row(const std::string& name, const PolicyEntry* policy,
                             const Config& config) const {
    ComparedPolicy row{.policy = name, .kv_tokens = config.kv_tokens};
    row.scheduled = policy != nullptr;
    row.tells_contents = policy == nullptr || !has_blocks(*policy);
    if (!row.tells_contents) {
      const PoolLayout::Blocks blocks = pool_layout_of(*policy)->blocks(config);
      row.kv_tokens = blocks.count * blocks.tokens;
    }
    row.capacity = row.kv_tokens * model_.token_bytes;
    if (!row.tells_contents) return row;
    if (policy == nullptr || !policy->has_states) return row;
    row.state_slots = config.state_slots;
    *row.capacity += row.state_slots * model_.state_bytes;
    return row;
  }

  /// A row whose pools share this many bytes.
  Result<ComparedPolicy> row_of(const std::string& name, const PolicyEntry* policy,
                                const std::optional<std::int64_t>& capacity) const {
    ComparedPolicy row{.policy = name, .capacity = capacity};
    row.scheduled = policy != nullptr;
    row.tells_contents = policy == nullptr || !has_blocks(*policy);
    if (!capacity) {
      if (policy == nullptr) return row;
      return fail(fmt::format("policy {} has pools of a fixed size, not of capacity inf", name));
    }
    const Result<Config> config = config_of(name);
    if (!config) return tl::unexpected(config.error());
    const PoolLayout* const layout = policy == nullptr ? nullptr : pool_layout_of(*policy);
    const Result<void> divided = layout == nullptr ? divide_slots(*config, policy, row)
                                                   : divide_as(*layout, name, *policy, row);
    if (!divided) return fail(fmt::format("policy {}: {}", name, divided.error().text));
    return row;
  }

  /// Divides the capacity of a row as the layout of the policy's family does.
  Result<void> divide_as(const PoolLayout& layout, const std::string& name,
                         const PolicyEntry& policy, ComparedPolicy& row) const {
    const std::string own = NamedPolicy::of(name).settings;
    return layout.contents(memory_of(policy, *row.capacity, fields_of({request_.config, own})))
        .map([&](const PoolContents& pools) {
          row.kv_tokens = pools.kv_tokens;
          row.state_slots = pools.state_slots;
          row.blocks = pools.blocks;
          row.block = pools.lookup;
        });
  }

  /// Bytes cut into slots: `share` per mille of them for states, the rest for tokens of KV.
  struct Slots {
    std::int64_t kv, states;
  };
  Slots divided(std::int64_t bytes, std::int64_t share) const {
    const std::int64_t states =
        share == 0 ? 0 : std::min(bytes / 1000 * share / model_.state_bytes, kMostSlots);
    return {std::min((bytes - states * model_.state_bytes) / model_.token_bytes, kMostSlots),
            states};
  }

  /// Divides the capacity of a row into KV slots and state slots.
  Result<void> divide_slots(const Config& config, const PolicyEntry* policy,
                            ComparedPolicy& row) const {
    const auto refuse = [&](std::string_view what) {
      return fail(fmt::format("{} bytes have no room for one {} of model {}", *row.capacity, what,
                              model_.name));
    };
    std::int64_t share = 0;
    if (has_two_pools(policy))
      share = config.state_share == 0 ? kDefaultStateShare : config.state_share;
    const Slots slots = divided(*row.capacity, share);
    row.state_slots = slots.states;
    if (share != 0 && row.state_slots == 0) return refuse("state");
    row.kv_tokens = slots.kv;
    row.kv_tokens -= row.kv_tokens % config.page;
    if (row.kv_tokens == 0) return refuse("page of KV");
    return {};
  }

  /// Runs all ideal policies in one pass over the workload.
  Result<void> run_ideal() {
    std::vector<std::pair<ComparedPolicy*, std::unique_ptr<IdealPolicy>>> ideal;
    OpenedStream stream = open_workload(request_.workload, request_.limit);
    if (!stream) return tl::unexpected(stream.error());
    block_ = (*stream)->block_size();
    for (ComparedPolicy& row : rows_) {
      if (row.scheduled) continue;
      const FoundIdeal found = **find_ideal(row.policy);
      const std::int64_t most = std::numeric_limits<std::int64_t>::max() / 2;
      ideal.emplace_back(&row,
                         found.entry->make({.model = &model_,
                                            .block = block_,
                                            .capacity_tokens = row.capacity ? row.kv_tokens : most,
                                            .number = found.number}));
    }
    if (ideal.empty()) return {};
    for (RequestSpec spec;;) {
      const Result<bool> more = (*stream)->next(spec);
      if (!more) return tl::unexpected(more.error());
      if (!*more) break;
      const IdealRequest request = IdealRequest::of(spec, **stream);
      for (auto& [row, policy] : ideal) policy->serve(request);
      count_work();
    }
    for (auto& [row, policy] : ideal) row->measures = policy->finish();
    return {};
  }

  /// The config fields that set the pools of a row.
  std::string pools_of(const ComparedPolicy& row, const PolicyEntry& policy) const {
    if (const PoolLayout* const layout = pool_layout_of(policy)) {
      const bool counts_blocks = layout->blocks != nullptr && row.blocks == 0;
      return counts_blocks ? "" : layout->fields(memory_of(policy, *row.capacity));
    }
    std::string pools = fmt::format("kv_tokens={}", row.kv_tokens);
    if (policy.has_states) pools += fmt::format(",state_slots={}", row.state_slots);
    return pools;
  }

  Result<void> run_scheduled(ComparedPolicy& row) {
    const NamedPolicy policy = NamedPolicy::of(row.policy);
    const std::size_t best = policy.settings.find(kBestAlpha);
    if (best == std::string::npos) return run_with(policy.settings, row);
    std::optional<ComparedPolicy> most;
    for (int i = 0; i < kAlphas; ++i) {
      ComparedPolicy tried = row;
      tried.chosen = fmt::format("alpha={}", i * 100);
      std::string settings = policy.settings;
      settings.replace(best, kBestAlpha.size(), tried.chosen);
      if (Result<void> done = run_with(settings, tried); !done) return done;
      if (!most || tried.measures.flops_saved > most->measures.flops_saved) most = std::move(tried);
    }
    row = *std::move(most);
    return {};
  }

  Result<void> run_with(const std::string& settings, ComparedPolicy& row) {
    const PolicyEntry& policy = *NamedPolicy::of(row.policy).entry;
    const bool has_states = policy.has_states;
    ReplayRequest replayed;
    replayed.file = request_.workload;
    replayed.subjects = {std::string(policy.name)};
    replayed.check = CheckLevel::off;
    std::string own =
        has_two_pools(&policy) ? settings_without(settings, {"state_share"}) : settings;
    const PoolLayout* const layout = pool_layout_of(policy);
    std::string host;
    if (row.host_bytes) {
      own = settings_without(own, {kHostShare});
      host = layout == nullptr ? host_tier_fields(row.host->kv_tokens, row.host->state_slots)
                               : host_of(*layout, policy, own, row)->fields;
    }
    replayed.config = joined_settings(
        {own, settings_without(request_.config, {"state_share", "kv_tokens", "state_slots"}), host,
         pools_of(row, policy), layout == nullptr ? "" : layout->scheduler});
    replayed.limit = request_.limit;
    replayed.model = std::string(model_.name);
    if (measured_ != nullptr)
      replayed.cost = [&] {
        return std::make_unique<MeasuredStepCost>(model_, measured_, row.cost_parts);
      };
    StateLedger ledger;
    if (has_states)
      replayed.watch = [&](const Operation& operation, const Reply& reply) {
        ledger.watch(operation, reply);
      };
    Requests requests(model_);
    replayed.ended = [&](const RequestOutcome& request) { requests.add(request); };
    const Result<ReplayOutcome> outcome = replay(replayed);
    if (!outcome) return tl::unexpected(outcome.error());
    if (outcome->decisions && !outcome->decisions->complete)
      return fail(
          fmt::format("policy {}: the driver of {} needs larger pools than {} KV tokens and "
                      "{} states",
                      row.policy, request_.workload, row.kv_tokens, row.state_slots));
    if (measured_ != nullptr && outcome->run->options().config.drafts != 0)
      return fail(fmt::format("policy {}: drafts={}: --cost {} knows no verification", row.policy,
                              outcome->run->options().config.drafts, request_.cost));
    for (const RequestOutcome& request : outcome->run->outcomes()) requests.add(request);
    measure(*outcome, std::move(requests), has_states, row);
    row.measures.states_admitted = ledger.admitted();
    row.measures.states_never_hit = ledger.never_hit();
    return {};
  }

  void measure(const ReplayOutcome& outcome, Requests requests, bool has_states,
               ComparedPolicy& row) const {
    const ReplaySession& run = *outcome.run;
    PolicyMeasures& measures = row.measures;
    measures.requests = requests.count;
    measures.hit_requests = requests.hits;
    measures.flops_saved = requests.flops_saved;
    row.refused_requests = requests.refused;
    const SubjectTotals& totals = run.totals(0);
    measures.input_tokens = totals.input_tokens + requests.unserved_tokens;
    measures.hit_tokens = totals.hit_tokens;
    measures.evicted_tokens = totals.evicted_kv;
    measures.evicted_states = totals.evicted_states;
    row.preemptions = totals.preemptions;
    if (run.options().config.ranks > 1) row.idle_share = run.rank_time.idle_share();
    if (!requests.ttft.empty() && !outcome.decisions) {
      row.ttft = summary_of(std::move(requests.ttft));
      row.e2e = summary_of(std::move(requests.e2e));
      if (requests.last > requests.first)
        row.output_tokens_per_s = static_cast<double>(requests.output_tokens) * 1e9 /
                                  static_cast<double>(requests.last - requests.first);
    }
    const std::optional<Snapshot> content = run.snapshot(0);
    if (!content) return;
    measures.stored_tokens = content->kv_total - content->kv_free;
    measures.states = content->states_total - content->states_free;
    if (has_states) measures.dead_tokens = dead_tokens(*content);
    if (content->host) row.host = measured_host(run, totals.host_hit_tokens, row);
  }

  /// The host tiers of all ranks.
  ComparedHost measured_host(const ReplaySession& run, std::int64_t hit_tokens,
                             const ComparedPolicy& row) const {
    ComparedHost all{.hit_tokens = hit_tokens};
    const PoolLayout* const layout = pool_layout_of(*NamedPolicy::of(row.policy).entry);
    const auto bytes = [&](const SnapshotHost::Copied& copied) {
      if (layout != nullptr)
        return layout->copied(model_, layout->blocks(run.options().config).tokens, copied);
      return copied.kv_tokens * model_.token_bytes + copied.states * model_.state_bytes;
    };
    for (std::int64_t rank = 0; rank < run.options().config.ranks; ++rank) {
      const SnapshotHost host = *run.snapshot(0, static_cast<std::size_t>(rank))->host;
      all.kv_tokens = host.kv_total;
      all.state_slots = host.states_total;
      all.bytes_to_host += bytes(host.to_host);
      all.bytes_to_device += bytes(host.to_device);
    }
    return all;
  }

  const CompareRequest& request_;
  const Model& model_;
  Config config_;
  std::shared_ptr<const MeasuredLayers> measured_;
  std::vector<ComparedPolicy> rows_;
  std::uint32_t block_ = 1;
};

}  // namespace

Nanoseconds ComparedPolicy::step_time() const {
  Nanoseconds sum = 0;
  for (const CostPart& part : cost_parts) sum += part.measured + part.modelled;
  return sum;
}

double ComparedPolicy::measured_share() const {
  Nanoseconds measured = 0;
  for (const CostPart& part : cost_parts) measured += part.measured;
  return rounded_ratio(measured, step_time());
}

std::uint64_t Comparison::digest() const {
  Digest digest;
  for (const ComparedPolicy& row : policies) {
    for (const char c : row.policy) digest.add(static_cast<std::uint64_t>(c));
    const PolicyMeasures& m = row.measures;
    for (const std::int64_t count :
         {row.kv_tokens, row.state_slots, m.requests, m.hit_requests, m.input_tokens, m.hit_tokens,
          m.stored_tokens, m.dead_tokens, m.states, m.states_admitted, m.states_never_hit,
          m.evicted_tokens, m.evicted_states, row.preemptions, row.refused_requests,
          row.ttft ? row.ttft->mean : 0, row.e2e ? row.e2e->mean : 0})
      digest.add(static_cast<std::uint64_t>(count));
    if (!row.host) continue;
    for (const std::int64_t count :
         {row.host->hit_tokens, row.host->bytes_to_host, row.host->bytes_to_device})
      digest.add(static_cast<std::uint64_t>(count));
  }
  return digest.value;
}

Result<Comparison> compare(const CompareRequest& request) {
  const auto start = std::chrono::steady_clock::now();
  const Result<const Model*> model = find_model(request.model);
  if (!model) return tl::unexpected(model.error());
  Result<Comparison> comparison = Comparer(request, **model).run();
  const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start;
  if (comparison) comparison->wall_s = spent.count();
  return comparison;
}

namespace {

Result<std::optional<std::int64_t>> parse_capacity(std::string_view option, std::string_view text) {
  struct Unit {
    std::string_view name;
    int shift;
  };
  constexpr std::array kUnits{Unit{"KiB", 10}, Unit{"MiB", 20}, Unit{"GiB", 30}, Unit{"TiB", 40}};
  if (text == "inf") return std::nullopt;
  int shift = 0;
  std::string_view digits = text;
  for (const Unit& unit : kUnits)
    if (text.ends_with(unit.name)) {
      shift = unit.shift;
      digits.remove_suffix(unit.name.size());
    }
  const Result<std::int64_t> count =
      parse_integer(digits, 1, std::numeric_limits<std::int64_t>::max() >> shift);
  if (!count && !digits.empty() && digits.find_first_not_of("0123456789") == digits.npos)
    return fail(fmt::format("{}: `{}`: {}", option, text.substr(0, 60), count.error().text));
  if (!count) {
    std::vector<std::string> in_units;  // the number of the text, with each unit
    in_units.reserve(kUnits.size());
    for (const Unit& unit : kUnits)
      in_units.push_back(
          fmt::format("{}{}", text.substr(0, text.find_first_not_of("0123456789")), unit.name));
    return fail(fmt::format("{}: `{}` is not a number of bytes like 1000000 or 64GiB, nor inf{}",
                            option, text.substr(0, 60),
                            but_near(text, {in_units.begin(), in_units.end()})));
  }
  return *count << shift;
}

}  // namespace

std::vector<std::string> parse_policies(std::string_view list) {
  std::vector<std::string> policies;
  for (std::string& word : words_of(list)) {
    if (word != "hybrid") {
      policies.push_back(std::move(word));
      continue;
    }
    for (const PolicyEntry& entry : Registry<PolicyEntry>::all())
      if (entry.has_states && !entry.capabilities.contains(Capability::slots) &&
          !entry.capabilities.contains(Capability::disaggregation))
        policies.emplace_back(entry.name);
  }
  return policies;
}

Result<std::vector<std::optional<std::int64_t>>> parse_capacities(std::string_view list) {
  std::vector<std::optional<std::int64_t>> capacities;
  for (const std::string& word : words_of(list)) {
    const auto capacity = parse_capacity("--capacity", word);
    if (!capacity) return tl::unexpected(capacity.error());
    capacities.push_back(*capacity);
  }
  return capacities;
}

Result<std::vector<std::int64_t>> parse_hosts(std::string_view list) {
  std::vector<std::int64_t> hosts;
  for (const std::string& word : words_of(list)) {
    const auto bytes = parse_capacity("--host", word);
    if (!bytes) return tl::unexpected(bytes.error());
    if (!*bytes) return fail("--host: `inf`: a host tier has a size");
    hosts.push_back(**bytes);
  }
  return hosts;
}

std::string gib_text(std::int64_t bytes) {
  return fmt::format("{:.1f}", static_cast<double>(bytes) / (std::int64_t{1} << 30));
}

std::string capacity_text(const std::optional<std::int64_t>& capacity) {
  if (!capacity) return "inf";
  if (*capacity % (std::int64_t{1} << 30) == 0) return fmt::format("{} GiB", *capacity >> 30);
  return gib_text(*capacity) + " GiB";
}

}  // namespace lockstep::cache_sim
