// vLLM 0.33's SchedulerConfig, as far as the oracles read it, from the words of `config
// scheduler=vllm:…` (cache_sim/server/schedulers.md). The policy and the scheduler read these words
// for themselves.
#pragma once

#include <cstdint>
#include <optional>

#include "reference/protocol/config.hpp"
#include "reference/protocol/request.hpp"

namespace lockstep::reference {

/// The members have vLLM's names, those in the comments.
struct VllmSchedulerConfig {
  std::int64_t max_tokens = 0;        ///< max_num_scheduled_tokens: of a step
  std::int64_t max_requests = 0;      ///< max_num_seqs
  bool is_async = false;              ///< async_scheduling
  bool by_priority = false;           ///< policy = "priority"
  std::int64_t long_prefill = 0;      ///< long_prefill_token_threshold
  bool adapts_long_prefill = false;   ///< the threshold grows to a fair share of max_tokens
  std::int64_t watermark_blocks = 0;  ///< watermark_blocks
  std::int64_t spec_tokens = 0;       ///< num_spec_tokens
  std::int64_t lookahead_tokens = 0;  ///< num_lookahead_tokens: of a drafter with KV of its own
  std::int64_t drafting_slots = 0;    ///< max_num_new_slots_for_drafting: of a draft model
  std::optional<std::int64_t> in_flight_tokens;  ///< max_in_flight_tokens; none: not limited
  std::int64_t shifted_tokens = 0;               ///< 1 where EAGLE reads one token ahead
  std::int64_t encoder_budget = 0;               ///< max_num_encoder_input_tokens; 0: no encoder
  std::int64_t encoder_cache = 0;                ///< encoder_cache_size
  bool whole_images = false;                     ///< disable_chunked_mm_input
  bool has_connector = false;                    ///< one that loads from the host

  /// Of a configuration whose `scheduler=` names another scheduler: its common members alone.
  static VllmSchedulerConfig of(const Config& config);

  /// Whether the image is ever encoded: it needs to fit into the step's budget and into the cache,
  /// and, where images are not cut, into one row.
  bool accepts(const ImageSpan& image) const;
};

}  // namespace lockstep::reference
