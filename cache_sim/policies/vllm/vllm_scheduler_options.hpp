// The options of `config scheduler=vllm…`, for the scheduler and for the cache, which cuts chunks
// by the same limits.
#pragma once

#include <cstdint>

#include "reference/base/result.hpp"
#include "reference/protocol/schedule.hpp"

namespace lockstep::cache_sim {

/// vllm[:priority][:long_prefill=N[:adaptive]][:watermark=BLOCKS][:draft_model]
/// [:encoder=N[:encoder_cache=N][:whole_images]]
struct VllmSchedulerOptions : SchedulerOptions {
  bool is_vllm = false;            ///< otherwise another scheduler is named, and the rest is unset
  bool by_priority = false;        ///< admissions and preemptions go by priority
  std::int64_t long_prefill = 0;   ///< tokens of a chunk where others run or wait; 0: all that fit
  bool adapts = false;             ///< long_prefill is no less than a fair share of a step's tokens
  std::int64_t watermark = 0;      ///< blocks that an admission leaves free where others run
  std::int64_t drafts = 0;         ///< most drafts of a verification
  std::int64_t draft_slots = 0;    ///< places of a step that a row needs for its drafter
  std::int64_t lookahead = 0;      ///< tokens after a row that its drafter writes KV for
  std::int64_t reads_ahead = 0;    ///< tokens after a row that its drafter reads
  std::int64_t encoder = 0;        ///< places of images that a step encodes; 0: images are tokens
  std::int64_t encoder_cache = 0;  ///< places of images that are kept
  bool whole_images = false;       ///< no row ends inside an image
  bool has_tier = false;           ///< a step without rows ends with `step`, for its copies

  /// The error is a sentence that names the field.
  static Result<VllmSchedulerOptions> of(const Config& config);

  /// Whether a step can encode the image, and, where it has to, compute it in one row.
  bool can_encode(const RequestSpec::Image& image) const;
};

}  // namespace lockstep::cache_sim
