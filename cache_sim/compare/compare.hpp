// Compares policies on the same workload: ideal ones (cache_sim/policies/ideal/ideal_policy.hpp),
// and every registered policy with the scheduler in front of it. A capacity is a number of bytes. A
// policy with a pool of KV and a pool of states splits it by the config field state_share. A policy
// with one pool of bytes gets all of it, and the model's bytes and FLOPs. A policy with one pool of
// blocks gets as many blocks as the bytes hold, cut as its server cuts them for the model. A host
// tier is a number of bytes beside the capacity, which `host_share` divides.
//
// `NAME@K=V@K=V` is a policy with config fields of its own. `@alpha=best` is chosen in hindsight:
// the workload is played with each of 21 alphas, and the row with the most FLOPs saved counts.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cache_sim/model/measured_step_cost.hpp"
#include "cache_sim/policies/ideal/ideal_policy.hpp"

namespace lockstep::cache_sim {

/// Per mille of the memory that goes to states: 0.9 / 1.9, a default of servers with two pools.
inline constexpr std::int64_t kDefaultStateShare = 474;

inline constexpr std::string_view kModelCost = "model";
inline constexpr std::string_view kDefaultEvidence = "reports/kernels";

struct CompareRequest {
  std::string workload;
  std::vector<std::string> policies;
  /// Capacities in bytes; nothing: infinite. A policy of infinite memory runs once, whatever the
  /// list says. With an empty list, the other policies have the pools of `config`.
  std::vector<std::optional<std::int64_t>> capacities;
  /// Bytes of the host tier, for each policy that may have one and does not set its fields itself;
  /// several go with one capacity. Nothing: no tier but that of the fields.
  std::vector<std::int64_t> hosts{};
  std::string config{};  ///< K=V,… fields that differ from the defaults
  std::string model = std::string(kDefaultModel);
  /// `model`: a step takes what ModelStepCost says. `measured:CARD`: the times of the model's
  /// kernels that were recorded on this card, from the files of `evidence`.
  std::string cost = std::string(kModelCost);
  std::string evidence = std::string(kDefaultEvidence);
  std::int64_t limit = 0;
};

/// Summary of a distribution of times, in nanoseconds.
struct TimeSummary {
  Nanoseconds mean = 0;
  Nanoseconds median = 0;
  Nanoseconds p99 = 0;
};

/// The host tier of a policy that has one. Its memory is beside the capacity.
struct ComparedHost {
  std::int64_t kv_tokens = 0;
  std::int64_t state_slots = 0;
  std::int64_t hit_tokens = 0;  ///< those of all hit tokens that were loaded from the host
  std::int64_t bytes_to_host = 0, bytes_to_device = 0;  ///< of all copies that were queued
};

/// One policy at one capacity.
struct ComparedPolicy {
  std::string policy;
  std::optional<std::int64_t> capacity;  ///< bytes; nothing: infinite
  std::int64_t kv_tokens = 0;  ///< tokens of KV that the capacity holds; 0 where it is infinite
  std::int64_t state_slots = 0;
  std::int64_t blocks = 0;  ///< of a policy with one pool of blocks
  std::int64_t block = 0;   ///< tokens of a block, where prompts are looked up in whole blocks
  std::optional<std::int64_t> host_bytes;  ///< of its host tier, where the request says sizes
  /// False of a policy with blocks: its replies do not say which states it stores and what it
  /// evicts, so these are not counted.
  bool tells_contents = true;
  std::string chosen;  ///< the value that alpha=best has chosen
  PolicyMeasures measures;
  std::optional<ComparedHost> host;
  // Only of policies behind the scheduler.
  bool scheduled = false;
  std::int64_t preemptions = 0;
  std::int64_t refused_requests = 0;
  std::optional<TimeSummary> ttft;  ///< none where the driver of the workload has no clock
  std::optional<TimeSummary> e2e;
  /// Output tokens of all requests over the time from the first arrival to the last end; 0 where
  /// there is no clock or nothing ended.
  double output_tokens_per_s = 0;
  /// Of several ranks: the share of their time in which they wait for the slowest one.
  std::optional<double> idle_share;
  /// Of `measured:CARD`: the time of all steps by its parts.
  std::vector<CostPart> cost_parts;
  Nanoseconds step_time() const;  ///< their sum
  double measured_share() const;  ///< of this sum
};

struct Comparison {
  std::vector<ComparedPolicy> policies;
  Model model;
  bool by_host = false;  ///< rows of a policy differ in their host tiers, not in their capacities
  double wall_s = 0;
  /// tokens of a block of the workload, in which ideal policies look prompts up
  std::int64_t block = 1;
  std::shared_ptr<const MeasuredLayers> measured;  ///< of `measured:CARD`

  std::uint64_t digest() const;
};

/// Runs the comparison. Errors are bad input: unknown names, a policy that cannot use its pools, a
/// bad workload.
Result<Comparison> compare(const CompareRequest& request);

/// Parses `P,Q,…`. `hybrid` stands for every policy for hybrid models whose rows requests can
/// share.
std::vector<std::string> parse_policies(std::string_view list);
/// Parses `64GiB,1000000000,inf`.
Result<std::vector<std::optional<std::int64_t>>> parse_capacities(std::string_view list);
/// The same of host tiers, which are finite.
Result<std::vector<std::int64_t>> parse_hosts(std::string_view list);
/// Bytes as a number of GiB with one decimal.
std::string gib_text(std::int64_t bytes);
std::string capacity_text(const std::optional<std::int64_t>& capacity);

}  // namespace lockstep::cache_sim
