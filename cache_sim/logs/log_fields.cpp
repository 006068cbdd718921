#include "cache_sim/logs/log_fields.hpp"

#include "cache_sim/base/text.hpp"

namespace lockstep::cache_sim {
namespace {

/// A name that is safe in a trace, in a table and on a terminal.
Result<std::string> read_id(const Record& line, std::string_view field) {
  Result<std::string> id = line.text(field);
  if (!id) return id;
  if (id->empty()) return line.error(field, "is empty");
  if (id->find_first_of(" \t\n") != std::string::npos) return line.error(field, "holds a blank");
  if (printable(*id) != *id) return line.error(field, "holds a control character");
  return id;
}

/// Sets prompt and output from two lists of token ids.
Result<void> read_tokens(const LogField& prompts, const LogField& outputs, LoggedRequest& request) {
  const auto prompt = prompts.line.token_ids(prompts.name);
  if (!prompt) return tl::unexpected(prompt.error());
  if (prompt->empty()) return prompts.line.error(prompts.name, "a prompt has at least one token");
  const auto output = outputs.line.token_ids(outputs.name);
  if (!output) return tl::unexpected(output.error());
  if (prompt->size() + output->size() > Tokens::kMaxSize)
    return outputs.line.error(outputs.name, "prompt and output have more than 2^24 tokens");
  std::vector<std::uint32_t> ids(prompt->begin(), prompt->end());
  ids.insert(ids.end(), output->begin(), output->end());
  request.tokens = Tokens::of_ids(std::move(ids));
  request.prompt_size = static_cast<std::uint32_t>(prompt->size());
  return {};
}

/// Reads the fields that a line of every format may have.
Result<void> read_marks(const Record& line, LoggedRequest& request) {
  if (line.has("salt")) {
    const Result<std::string> salt = read_id(line, "salt");
    if (!salt) return tl::unexpected(salt.error());
    request.salt = Name::intern(*salt);
  }
  if (line.has("greedy")) {
    const Result<bool> greedy = line.flag("greedy");
    if (!greedy) return tl::unexpected(greedy.error());
    request.greedy = *greedy;
  }
  if (!line.has("start")) return {};
  const auto start = line.time("start", kSecond);
  if (!start) return tl::unexpected(start.error());
  const auto end = line.time("end", kSecond);
  if (!end) return tl::unexpected(end.error());
  if (*end < *start) return line.error("end", "is before the start");
  request.start = *start;
  request.end = *end;
  return {};
}

}  // namespace

Result<LoggedRequest> read_request(const Record& line, const LogField& id, const LogField& prompt,
                                   const LogField& output, const LogField& cached) {
  LoggedRequest request;
  const Result<std::string> name = read_id(id.line, id.name);
  if (!name) return tl::unexpected(name.error());
  request.id = *name;
  if (const auto read = read_tokens(prompt, output, request); !read)
    return tl::unexpected(read.error());
  const auto tokens = cached.line.integer(cached.name, 0, Tokens::kMaxSize);
  if (!tokens) return tl::unexpected(tokens.error());
  request.cached = *tokens;
  if (const auto read = read_marks(line, request); !read) return tl::unexpected(read.error());
  return request;
}

}  // namespace lockstep::cache_sim
