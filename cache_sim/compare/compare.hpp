// The same workload under several policies: ideal ones (cache_sim/policies/ideal/ideal_policy.hpp),
// and every registered policy with the scheduler in front of it. Capacities are bytes of one pool;
// a policy with two pools splits it by the config field state_share, one with a pool of bytes gets
// them all, and the model's bytes and FLOPs, and one with a pool of blocks as many as they hold,
// cut as vLLM cuts them for the model.
//
// `NAME@K=V@K=V` is a policy with config fields of its own. `@alpha=best` knows the future: the
// workload is played with each of 21 alphas, and the one that saves most FLOPs counts.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cache_sim/policies/ideal/ideal_policy.hpp"

namespace lockstep::cache_sim {

/// SGLang's default --mamba-full-memory-ratio 0.9: 0.9 / 1.9 of the memory is for states. Per
/// mille.
inline constexpr std::int64_t kDefaultStateShare = 474;

struct CompareRequest {
  std::string workload;
  std::vector<std::string> policies;
  /// Bytes; nothing: infinite. A policy of infinite memory runs once whatever stands here. Empty:
  /// the other policies have the pools of `config`.
  std::vector<std::optional<std::int64_t>> capacities;
  std::string config;  ///< K=V,… over the defaults
  std::string model = std::string(kDefaultModel);
  std::int64_t limit = 0;
};

/// What a distribution of times looks like, in nanoseconds.
struct TimeSummary {
  Nanoseconds mean = 0;
  Nanoseconds median = 0;
  Nanoseconds p99 = 0;
};

/// One policy at one capacity.
struct ComparedPolicy {
  std::string policy;
  std::optional<std::int64_t> capacity;  ///< bytes; nothing: infinite
  std::int64_t kv_tokens = 0;            ///< what the capacity makes; 0 where it is infinite
  std::int64_t state_slots = 0;
  std::int64_t blocks = 0;  ///< of a policy with one pool of blocks
  std::int64_t block = 0;   ///< tokens in one of them, where prompts are looked up in whole ones
  /// False of a policy with blocks: its replies do not say which states it stores and what it
  /// evicts, so nobody has counted them.
  bool tells_contents = true;
  std::string chosen;  ///< what `best` turned out to be
  PolicyMeasures measures;
  // Of policies behind the scheduler alone.
  bool scheduled = false;
  std::int64_t preemptions = 0;
  std::int64_t refused_requests = 0;
  std::optional<TimeSummary> ttft;  ///< none where the workload has a driver without a clock
  std::optional<TimeSummary> e2e;
};

struct Comparison {
  std::vector<ComparedPolicy> policies;
  Model model;
  double wall_s = 0;
  std::int64_t block = 1;  ///< of the workload: tokens in which ideal policies look prompts up

  std::uint64_t digest() const;
};

/// Errors are bad input: unknown names, a policy that has no use for its pools, a bad workload.
Result<Comparison> compare(const CompareRequest& request);

/// `P,Q,…`; `hybrid` stands for every policy for hybrid models, but for those whose rows nobody
/// shares.
std::vector<std::string> parse_policies(std::string_view list);
/// `64GiB,1000000000,inf`.
Result<std::vector<std::optional<std::int64_t>>> parse_capacities(std::string_view list);
std::string capacity_text(const std::optional<std::int64_t>& capacity);

}  // namespace lockstep::cache_sim
