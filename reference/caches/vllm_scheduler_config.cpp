#include "reference/caches/vllm_scheduler_config.hpp"

#include <map>
#include <sstream>
#include <string>

namespace lockstep::reference {

VllmSchedulerConfig VllmSchedulerConfig::of(const Config& config) {
  VllmSchedulerConfig rules{.max_tokens = config.chunked_prefill,
                            .max_requests = config.max_running,
                            .is_async = config.overlap != 0};
  std::map<std::string, std::int64_t> words;  // a word without `=` counts as 1
  std::stringstream text(config.scheduler);
  for (std::string word; std::getline(text, word, ':');) {
    const std::size_t equals = word.find('=');
    words[word.substr(0, equals)] =
        equals == std::string::npos ? 1 : std::stoll(word.substr(equals + 1));
  }
  if (!words.contains("vllm")) return rules;
  const std::int64_t concurrent_batches = rules.is_async ? 2 : 1;
  rules.in_flight_tokens = concurrent_batches * rules.max_tokens;
  rules.by_priority = words["priority"] != 0;
  rules.long_prefill = words["long_prefill"];
  rules.adapts_long_prefill = words["adaptive"] != 0;
  rules.watermark_blocks = words["watermark"];
  rules.drafting_slots = words["draft_model"];
  rules.spec_tokens = config.drafts;
  rules.has_connector = config.number("cpu_chunks") + config.number("cpu_blocks") > 0;
  const bool has_eagle = config.number("eagle") != 0;
  if (has_eagle) rules.shifted_tokens = 1;
  if (has_eagle || rules.drafting_slots > 0) rules.lookahead_tokens = rules.spec_tokens;
  rules.encoder_budget = words["encoder"];
  rules.encoder_cache = words["encoder_cache"] > 0 ? words["encoder_cache"] : rules.encoder_budget;
  rules.whole_images = words["whole_images"] != 0;
  return rules;
}

bool VllmSchedulerConfig::accepts(const ImageSpan& image) const {
  if (encoder_budget == 0) return true;
  const bool is_encoded = image.size <= encoder_budget && image.size <= encoder_cache;
  const bool fits_a_chunk = long_prefill == 0 || image.size + shifted_tokens <= long_prefill;
  const bool fits_a_step = image.size + shifted_tokens + drafting_slots <= max_tokens;
  return is_encoded && (!whole_images || (fits_a_chunk && fits_a_step));
}

}  // namespace lockstep::reference
