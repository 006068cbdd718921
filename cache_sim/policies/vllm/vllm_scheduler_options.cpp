#include "cache_sim/policies/vllm/vllm_scheduler_options.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "reference/protocol/host_tier.hpp"

namespace lockstep::cache_sim {

Result<VllmSchedulerOptions> VllmSchedulerOptions::of(const Config& config) {
  VllmSchedulerOptions options{SchedulerOptions::of(config)};
  std::string_view rest = config.scheduler;
  const auto next = [&] {
    const std::string_view word = rest.substr(0, rest.find(':'));
    rest.remove_prefix(std::min(word.size() + 1, rest.size()));
    return word;
  };
  options.is_vllm = next() == "vllm";
  if (!options.is_vllm) return options;
  options.has_tier = has_host_tier(config);
  const std::int64_t eagle = config.number("eagle");
  // A drafter with a model of its own, as EAGLE is, has KV of its own as well.
  bool has_draft_model = eagle != 0;
  std::set<std::string_view> given;
  while (!rest.empty()) {
    const std::string_view word = next();
    const std::string_view option = word.substr(0, word.find('='));
    std::int64_t* const number = option == "long_prefill"    ? &options.long_prefill
                                 : option == "watermark"     ? &options.watermark
                                 : option == "encoder"       ? &options.encoder
                                 : option == "encoder_cache" ? &options.encoder_cache
                                                             : nullptr;
    if (!given.insert(option).second)
      return fail(fmt::format("field scheduler: option {} stands twice", option));
    if (word == "priority") {
      options.by_priority = true;
    } else if (word == "adaptive") {
      options.adapts = true;
    } else if (word == "whole_images") {
      options.whole_images = true;
    } else if (word == "draft_model") {
      has_draft_model = true;
      options.draft_slots = 1;
    } else if (number != nullptr && option != word) {
      const Result<std::int64_t> value =
          parse_integer(word.substr(option.size() + 1), 0, std::int64_t{1} << 30);
      if (!value) return fail(fmt::format("field scheduler: {}: {}", option, value.error().text));
      *number = *value;
    } else {
      return fail(fmt::format("field scheduler: vllm has no option `{}`", word));
    }
  }
  if (options.draft_slots > 0 && (eagle != 0 || config.drafts == 0))
    return fail("field scheduler: draft_model needs drafts= and is no EAGLE (eagle=0)");
  if (options.draft_slots >= options.chunked_prefill)
    return fail("field scheduler: draft_model leaves no tokens of chunked_prefill=1");
  if (options.encoder == 0 && (options.encoder_cache > 0 || options.whole_images))
    return fail("field scheduler: encoder_cache and whole_images need encoder=");
  if (options.encoder > 0 && config.number("modules") > 1)
    return fail("field scheduler: encoder does not go with several modules");
  if (options.encoder > 0 && options.encoder_cache == 0) options.encoder_cache = options.encoder;
  options.drafts = config.drafts;
  if (eagle != 0) options.reads_ahead = 1;
  if (has_draft_model) options.lookahead = config.drafts;
  return options;
}

bool VllmSchedulerOptions::can_encode(const RequestSpec::Image& image) const {
  if (encoder == 0) return true;
  if (image.size > std::min(encoder, encoder_cache)) return false;
  std::int64_t row = chunked_prefill - draft_slots;
  if (long_prefill > 0) row = std::min(row, long_prefill);
  return !whole_images || image.size + reads_ahead <= row;
}

}  // namespace lockstep::cache_sim
