#include "cache_sim/check/start_subject.hpp"

#include <fmt/format.h>

#include "cache_sim/check/exec_subject.hpp"
#include "cache_sim/model/pool_layout.hpp"
#include "reference/protocol/near_word.hpp"
#include "reference/protocol/schedule.hpp"

namespace lockstep::cache_sim {
namespace {

/// Config fields that every policy, or the scheduler in front of it, honours.
const ConfigFields& common_fields() {
  static const ConfigFields fields{"policy",      "kv_tokens",    "state_slots",  "chunked_prefill",
                                   "max_running", "request_rows", "step_time",    "model_chunk",
                                   "ranks",       "routing",      "scheduler",    "graph_batches",
                                   "kv_stride",   "state_stride", kFidelityField, kModelField};
  return fields;
}

constexpr Capabilities kRequests{Capability::request};

/// A child is sent operations of these levels even if it has not announced them; it answers
/// `unsupported` where it does not know one.
constexpr Capabilities kChildrenSayThemselves{Capability::request, Capability::slots,
                                              Capability::transfers, Capability::draft_trees,
                                              Capability::partial_finish};

std::string unknown_scheduler(std::string_view name) {
  std::string names;
  for (const SchedulerEntry& entry : Registry<SchedulerEntry>::all())
    names.append(names.empty() ? "" : ", ").append(entry.name);
  return fmt::format("field scheduler: there is no `{}`; there are {}", name, names);
}

/// An error where the policy would ignore a config field that was set.
Result<void> check_config(const PolicyEntry& policy, const Config& config) {
  for (const std::string& field : config.changed())
    if (!common_fields().contains(field) && !policy.config_fields.contains(field))
      return fail(fmt::format("policy {} does not use the config field {}", policy.name, field));
  if (const std::vector<Config::Idle> idle = config.idle(); !idle.empty())
    return fail(fmt::format("field {}: it has no effect {}", idle.front().field, idle.front().why));
  if (policy.has_states && config.state_slots == 0)
    return fail(
        fmt::format("field state_slots: policy {} needs at least one state slot", policy.name));
  constexpr std::string_view kRoutings[] = {"", "load", "round", "prefix", "balanced"};
  if (std::ranges::find(kRoutings, config.routing) == std::end(kRoutings))
    return fail(fmt::format("field routing: `{}` is none of load, round, prefix and balanced",
                            config.routing));
  const auto* const scheduler = Registry<SchedulerEntry>::find(scheduler_name(config));
  if (scheduler == nullptr) return fail(unknown_scheduler(scheduler_name(config)));
  if (Result<void> serves = scheduler->check(config, policy); !serves) return serves;
  if (!config.graph_batches.empty() && config.graphs().empty())
    return fail(fmt::format("field graph_batches: `{}` is no list of ascending numbers of rows",
                            config.graph_batches));
  if (config.kv_tokens < config.page)
    return fail(fmt::format("field kv_tokens: {} is less than one page of {}", config.kv_tokens,
                            config.page));
  if (policy.check != nullptr)
    if (Result<void> fits = policy.check(config); !fits) return fits;
  return check_fidelity(policy, config);
}

/// An auditor for the subject's family of policies; null where no auditor knows it.
std::unique_ptr<Auditor> make_auditor(Subject& subject, const LabelState* labels) {
  for (const AuditorEntry& family : Registry<AuditorEntry>::all())
    if (auto auditor = family.make(subject, labels)) return auditor;
  return nullptr;
}

using Started = Result<std::unique_ptr<SubjectSeat>>;

tl::unexpected<Error> unknown(const std::string& name, const Config& config) {
  const bool is_oracle = name.starts_with("oracle:");
  const std::string near = but_near(std::string_view(name).substr(is_oracle ? 7 : 0),
                                    names_in(Registry<PolicyEntry>::all()));
  return fail(fmt::format("{}there is no subject `{}`{}; `lockstep list subjects` shows all",
                          name == config.policy ? "field policy: " : "", name, near));
}

/// The layers of subjects that are not checked. It has no state, so all subjects share it.
NoLayerState no_layers;

/// The size of the KV pool in the unit in which a child counts KV: blocks where a policy beside it,
/// or the policy of its config, has a pool of blocks; otherwise tokens.
std::int64_t kv_total(const RunOptions& options) {
  std::vector<std::string_view> names(options.subjects.begin(), options.subjects.end());
  names.push_back(options.config.policy);
  for (std::string_view name : names) {
    if (name.starts_with("oracle:")) name.remove_prefix(7);
    const PolicyEntry* const policy = Registry<PolicyEntry>::find(name);
    const PoolLayout* const layout = policy == nullptr ? nullptr : pool_layout_of(*policy);
    if (layout != nullptr && layout->blocks != nullptr) return layout->blocks(options.config).count;
  }
  return options.config.kv_tokens;
}

Started start_closed(const std::string& name, const RunOptions& options) {
  if (name.find_first_not_of(" \t\n", 5) == std::string::npos)
    return fail(fmt::format("subject `{}` names no command, as exec:COMMAND does", name));
  auto child = start_child({.command = name.substr(5),
                            .config = options.config,
                            .timeout = options.timeout,
                            .children = options.children});
  if (!child) return tl::unexpected(child.error());
  auto seat = std::make_unique<SubjectSeat>();
  seat->is_child = true;
  seat->subject = std::move(*child);
  seat->capabilities = said_by(*seat->subject).capabilities | kChildrenSayThemselves;
  if (options.check != CheckLevel::off)
    seat->closed = std::make_unique<ClosedSubject>(options.config, kv_total(options),
                                                   said_by(*seat->subject).promises);
  return seat;
}

Started start_oracle(const std::string& name, const RunOptions& options) {
  const std::string policy_name = name.substr(7);
  const OracleEntry* const entry = Registry<OracleEntry>::find(policy_name);
  if (entry == nullptr) return unknown(name, options.config);
  const PolicyEntry* const policy = Registry<PolicyEntry>::find(policy_name);
  if (policy == nullptr) return unknown(name, options.config);
  if (const Result<void> fits = check_config(*policy, options.config); !fits)
    return tl::unexpected(fits.error());
  auto seat = std::make_unique<SubjectSeat>();
  seat->capabilities = policy->capabilities | kRequests;
  seat->is_oracle = true;
  seat->subject = entry->make({.config = options.config, .layers = &no_layers});
  return seat;
}

Started start_policy(const std::string& name, const RunOptions& options) {
  const PolicyEntry* const entry = Registry<PolicyEntry>::find(name);
  if (entry == nullptr) return unknown(name, options.config);
  if (const Result<void> fits = check_config(*entry, options.config); !fits)
    return tl::unexpected(fits.error());
  if (options.check == CheckLevel::off && options.config.options.contains(kFidelityField))
    return fail("field fidelity: it has no effect with --check off, which looks into no slot");
  auto seat = std::make_unique<SubjectSeat>();
  seat->capabilities = entry->capabilities | kRequests;
  SubjectOptions subject{.config = options.config, .layers = &no_layers};
  if (options.defect_name.starts_with(name + ":")) subject.defect = options.defect;
  if (options.check != CheckLevel::off) {
    const PolicyEntry::SlotCounts slots = entry->slots_in(options.config);
    seat->labels = std::make_unique<LabelState>(
        slots.states, slots.kv_end,
        LabelState::Strides{options.config.kv_stride, options.config.state_stride});
    if (slots.index_keys) seat->labels->keep_index_keys();
    subject.layers = seat->labels.get();
    seat->numbers = numbered_pools(*entry, options.config, *seat->labels, slots);
    if (seat->numbers) subject.layers = seat->numbers.get();
    seat->blocks = numbered_blocks(*entry, options.config);
    subject.blocks = seat->blocks.get();
    if (RowTeller* const rows = seat->rows(); rows != nullptr && options.keep_events)
      rows->tell_rows();
  }
  seat->subject = entry->make(subject);
  if (options.check == CheckLevel::all)
    seat->auditor = make_auditor(*seat->subject, seat->labels.get());
  return seat;
}

}  // namespace

Result<std::unique_ptr<SubjectSeat>> start_subject(const std::string& name,
                                                   const RunOptions& options) {
  if (name.starts_with("exec:")) return start_closed(name, options);
  if (name.starts_with("oracle:")) return start_oracle(name, options);
  return start_policy(name, options);
}

}  // namespace lockstep::cache_sim
