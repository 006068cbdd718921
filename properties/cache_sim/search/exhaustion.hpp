// Small scopes, completely: every short trace, and every allocation of a fixture with empty pools.
#pragma once

#include <cstdint>
#include <string>

namespace lockstep::testing_support {

/// Counts of the traces played, and the first finding with its trace; empty where there was none.
struct Exhausted {
  std::int64_t traces = 0;
  std::int64_t refusals = 0;  ///< of operations that found a pool empty
  std::string finding;
};

/// Every trace of up to `most` operations with two requests, three state slots and few KV slots, on
/// the policy beside its oracle. Traces that begin with an illegal operation are not gone through.
Exhausted all_short_traces(const std::string& policy, int most);

/// Every order of up to `most` operations of two requests and of the copies between device and
/// host, after each of five histories of one prefix, on `sglang-no-buffer` beside its oracle: one
/// state on the host, and one slot of the device too few for both requests and the prefix.
/// `defect`: planted into the policy; empty: none.
Exhausted all_copies(const std::string& write_policy, const std::string& defect, int most);

/// Every order of up to `most` operations of two requests that move from one server to the other,
/// in two slices, after each of four histories, on `sglang-pd` beside its oracle: the decode server
/// has one state. `defect`: as above.
Exhausted all_transfers(const std::string& defect, int most);

/// Which memory is empty.
enum class Short { of_kv, of_states, of_both };

/// The file's operations as often as it has operations: before the n-th one, whatever can be
/// evicted is, and what is free is taken away for as long as that operation lasts; every `step`-th
/// n. In the end everything is given back, and every pool must be full again.
Exhausted each_allocation_failing(const std::string& file, Short what, std::size_t step);

}  // namespace lockstep::testing_support
