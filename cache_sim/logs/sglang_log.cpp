// SGLang's answers of /generate, each with the input_ids that were sent beside it.
#include <nlohmann/json.hpp>

#include "cache_sim/logs/log_fields.hpp"

namespace lockstep::cache_sim {
namespace {

Result<LoggedRequest> read_sglang(const Record& line) {
  const Result<Record> meta = line.object("meta_info");
  if (!meta) return tl::unexpected(meta.error());
  Result<LoggedRequest> request = read_request(line, {*meta, "id"}, {line, "input_ids"},
                                               {line, "output_ids"}, {*meta, "cached_tokens"});
  if (!request) return request;
  const auto prompt = meta->integer("prompt_tokens", request->prompt_size, request->prompt_size);
  if (!prompt) return tl::unexpected(prompt.error());
  return request;
}

const Registration<LogFormat> kSglang{
    {.name = "sglang",
     .summary = "SGLang's /generate answers",
     .recognises = [](const nlohmann::json& first) { return first.contains("meta_info"); },
     .read = read_sglang}};

}  // namespace
}  // namespace lockstep::cache_sim
