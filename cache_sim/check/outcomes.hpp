// The results of a run: its findings, the outcome of each request, totals by subject, and the
// events and bars that a report shows.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "reference/base/finding.hpp"
#include "reference/protocol/config.hpp"
#include "reference/protocol/operation.hpp"
#include "reference/protocol/subject.hpp"

namespace lockstep::cache_sim {

/// A finding and its place, as messages and the JSON show it.
struct LocatedFinding {
  Finding finding;
  std::string subject;
  std::string file;
  int line = 0;
  std::int64_t event = 0;  ///< counted from 1
  std::string request;
  std::string operation;  ///< the event's line, long token lists cut
  /// The events before it and the event itself, as `operation → reply`.
  std::vector<std::string> around;
};

/// The outcome of one request.
struct RequestOutcome {
  Name id;
  std::int64_t prompt_tokens = 0;
  std::int64_t cached_tokens = -1;  ///< at its first admission; -1: never admitted
  std::int64_t output_tokens = 0;
  FinishReason finish = FinishReason::running;
  bool computes = false;  ///< it has computed tokens since it was last admitted
  Nanoseconds arrival = 0;
  Nanoseconds first_token = -1;
  Nanoseconds end = -1;
};

/// One bar of the timeline of requests.
struct Span {
  std::string name;
  Name request;
  Nanoseconds begin;
  Nanoseconds end;
};

/// Operations of one form (operation_form) that a child does not support and that were therefore
/// sent to no subject.
struct LeftOut {
  std::string why;  ///< the sentence that names the child
  std::int64_t count = 0;
};

/// Totals of one subject: a row of a table of policies.
struct SubjectTotals {
  std::int64_t input_tokens = 0;  ///< of prompts, counted at each request's first admission
  std::int64_t hit_tokens = 0;
  std::int64_t host_hit_tokens = 0;  ///< those of hit_tokens that were loaded from the host
  std::int64_t evicted_kv = 0;       ///< where replies report it
  std::int64_t evicted_states = 0;
  std::int64_t preemptions = 0;  ///< of requests that had computed tokens
};

/// One event, kept for a report.
struct KeptEvent {
  int line;
  Nanoseconds time;
  std::string operation;
  std::string reply;
  std::int64_t kv_used = 0;
  std::int64_t states_used = 0;
  std::vector<SnapshotHost::InFlight> copies{};  ///< in flight after it
  std::vector<std::string> rows{};               ///< of a fidelity with numbers: the rows that ran
};

}  // namespace lockstep::cache_sim
