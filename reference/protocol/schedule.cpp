#include "reference/protocol/schedule.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace lockstep {

Result<SchedulerOptions> SchedulerOptions::of(const Config& config) {
  SchedulerOptions options{.chunked_prefill = config.chunked_prefill,
                           .max_running = config.max_running,
                           .overlap = config.overlap != 0,
                           .page = config.page,
                           .graph_batches = config.graphs()};
  std::string_view rest = config.scheduler;
  const auto next = [&] {
    const std::string_view word = rest.substr(0, rest.find(':'));
    rest.remove_prefix(std::min(word.size() + 1, rest.size()));
    return word;
  };
  const std::string_view name = next();
  options.sglang = name == "sglang";
  options.vllm = name == "vllm";
  if (!name.empty() && !options.sglang && !options.vllm)
    return fail(fmt::format("field scheduler: `{}` is neither sglang nor vllm", name));
  // A drafter with a model of its own, as EAGLE is, has KV of its own as well.
  bool has_draft_model = options.vllm && config.eagle != 0;
  while (!rest.empty()) {
    const std::string_view word = next();
    const std::string_view option = word.substr(0, word.find('='));
    std::int64_t* const number = option == "long_prefill"    ? &options.long_prefill
                                 : option == "watermark"     ? &options.watermark
                                 : option == "encoder"       ? &options.encoder
                                 : option == "encoder_cache" ? &options.encoder_cache
                                                             : nullptr;
    if (options.vllm && word == "priority") {
      options.by_priority = true;
    } else if (options.vllm && word == "adaptive") {
      options.adapts = true;
    } else if (options.vllm && word == "whole_images") {
      options.whole_images = true;
    } else if (options.vllm && word == "draft_model") {
      has_draft_model = true;
      options.draft_slots = 1;
    } else if (options.vllm && number != nullptr && option != word) {
      const Result<std::int64_t> value =
          parse_integer(word.substr(option.size() + 1), 0, std::int64_t{1} << 30);
      if (!value) return fail(fmt::format("field scheduler: {}: {}", option, value.error().text));
      *number = *value;
    } else {
      return fail(fmt::format("field scheduler: {} has no option `{}`", name, word));
    }
  }
  if (options.draft_slots > 0 && (config.eagle != 0 || config.drafts == 0))
    return fail("field scheduler: draft_model needs drafts= and is no EAGLE (eagle=0)");
  if (options.draft_slots >= options.chunked_prefill)
    return fail("field scheduler: draft_model leaves no tokens of chunked_prefill=1");
  if (options.encoder == 0 && (options.encoder_cache > 0 || options.whole_images))
    return fail("field scheduler: encoder_cache and whole_images need encoder=");
  if (options.encoder > 0 && config.modules > 1)
    return fail("field scheduler: encoder does not go with several modules");
  if (options.encoder > 0 && options.encoder_cache == 0) options.encoder_cache = options.encoder;
  if (options.vllm) options.drafts = config.drafts;
  if (options.vllm && config.eagle != 0) options.reads_ahead = 1;
  if (has_draft_model) options.lookahead = config.drafts;
  return options;
}

bool SchedulerOptions::can_encode(const RequestSpec::Image& image) const {
  if (encoder == 0) return true;
  if (image.size > std::min(encoder, encoder_cache)) return false;
  std::int64_t row = chunked_prefill - draft_slots;
  if (long_prefill > 0) row = std::min(row, long_prefill);
  return !whole_images || image.size + reads_ahead <= row;
}

void SchedulerEpisode::begin(const SchedulerEvent& with) {
  event = with;
  asked.clear();
  notes.clear();
  forward.reset();
  idle = false;
}

void SchedulerEpisode::add(const SchedulerEffects& effects) {
  notes.insert(notes.end(), effects.notes.begin(), effects.notes.end());
  if (effects.forward) forward = effects.forward;
  idle = idle || effects.idle;
}

}  // namespace lockstep
