// SGLang's answers of /generate, each with the input_ids that were sent beside it.
#include <nlohmann/json.hpp>

#include "cache_sim/logs/log_fields.hpp"

namespace lockstep::cache_sim {
namespace {

Result<LoggedRequest> read_sglang(const Record& line) {
  LoggedRequest request;
  const Result<Record> meta = line.object("meta_info");
  if (!meta) return tl::unexpected(meta.error());
  const Result<std::string> id = read_id(*meta, "id");
  if (!id) return tl::unexpected(id.error());
  request.id = *id;
  if (const auto read = read_tokens(line, "input_ids", line, "output_ids", request); !read)
    return tl::unexpected(read.error());
  const auto prompt = meta->integer("prompt_tokens", request.prompt_size, request.prompt_size);
  if (!prompt) return tl::unexpected(prompt.error());
  const auto cached = meta->integer("cached_tokens", 0, Tokens::kMaxSize);
  if (!cached) return tl::unexpected(cached.error());
  request.cached = *cached;
  if (const auto read = read_marks(line, request); !read) return tl::unexpected(read.error());
  return request;
}

const Registration<LogFormat> kSglang{
    {.name = "sglang",
     .summary = "SGLang's /generate answers",
     .recognises = [](const nlohmann::json& first) { return first.contains("meta_info"); },
     .read = read_sglang}};

}  // namespace
}  // namespace lockstep::cache_sim
