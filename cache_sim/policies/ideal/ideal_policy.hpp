// Ideal policies: upper bounds of what a cache can hit. They know no scheduler, no pools and no
// running requests: requests come one after the other, each is looked up and then stored as a whole
// before the next one comes.
//
// A prompt is looked up, and stored, in whole blocks of its workload (RequestStream::block_size).
// A request stores its prompt and, if the workload knows the outputs, its output without the last
// token, which no server computes.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>

#include "cache_sim/model/model.hpp"
#include "cache_sim/workloads/workload.hpp"

namespace lockstep::cache_sim {

struct IdealRequest {
  Tokens prompt;  ///< whole blocks
  Tokens stored;  ///< tokens that it stores; begins with `prompt`
  std::int64_t input_tokens;

  static IdealRequest of(const RequestSpec& spec, const RequestStream& workload);
};

/// Measurements of one policy, ideal or not. Counts are tokens, states or requests.
struct PolicyMeasures {
  std::int64_t requests = 0;
  std::int64_t hit_requests = 0;
  std::int64_t input_tokens = 0;
  std::int64_t hit_tokens = 0;
  double flops_saved = 0;
  std::int64_t stored_tokens = 0;  ///< in the cache at the end
  /// Those of stored_tokens that no request can reuse, because no stored state lies behind them; 0
  /// without states.
  std::int64_t dead_tokens = 0;
  std::int64_t states = 0;            ///< in the cache at the end
  std::int64_t states_admitted = 0;   ///< different prefixes for which a state was ever stored
  std::int64_t states_never_hit = 0;  ///< of those
  std::int64_t evicted_tokens = 0;
  std::int64_t evicted_states = 0;
};

class IdealPolicy {
 public:
  explicit IdealPolicy(const Model& costs) : model_(costs) {}
  virtual ~IdealPolicy() = default;

  virtual void serve(const IdealRequest& request) = 0;
  /// After the last request.
  virtual PolicyMeasures finish() = 0;

 protected:
  void count(std::int64_t input_tokens, std::int64_t hit_tokens) {
    ++measures_.requests;
    measures_.hit_requests += hit_tokens > 0 ? 1 : 0;
    measures_.input_tokens += input_tokens;
    measures_.hit_tokens += hit_tokens;
    measures_.flops_saved += model_.prefill_flops(hit_tokens);
  }

  Model model_;
  PolicyMeasures measures_;
};

struct IdealOptions {
  const Model* model;
  std::uint32_t block;           ///< tokens in which anything is stored
  std::int64_t capacity_tokens;  ///< of KV; whole blocks of it are used. Ignored by the infinite
  std::int64_t number = 0;       ///< the N of a name that ends so
};

struct IdealEntry {
  std::string_view name;  ///< an ending -N stands for a number of tokens
  std::string_view summary;
  bool has_capacity;
  std::unique_ptr<IdealPolicy> (*make)(const IdealOptions&);
};

/// An entry and the N of its name.
struct FoundIdeal {
  const IdealEntry* entry;
  std::int64_t number;
};
/// Nothing where no ideal policy is called so. The error: a number that is none.
Result<std::optional<FoundIdeal>> find_ideal(std::string_view name);

}  // namespace lockstep::cache_sim
