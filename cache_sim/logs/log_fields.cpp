#include "cache_sim/logs/log_fields.hpp"

#include <limits>

#include "cache_sim/base/text.hpp"

namespace lockstep::cache_sim {
namespace {

constexpr Nanoseconds kSecond = 1'000'000'000;
constexpr std::int64_t kMostId = std::numeric_limits<std::uint32_t>::max();

}  // namespace

Result<std::string> read_id(const Record& line, std::string_view field) {
  Result<std::string> id = line.text(field);
  if (!id) return id;
  if (id->empty()) return line.error(field, "is empty");
  if (id->find_first_of(" \t\n") != std::string::npos) return line.error(field, "holds a blank");
  if (printable(*id) != *id) return line.error(field, "holds a control character");
  return id;
}

Result<void> read_tokens(const Record& prompt_line, std::string_view prompt_field,
                         const Record& output_line, std::string_view output_field,
                         LoggedRequest& request) {
  const auto prompt = prompt_line.integers(prompt_field, 0, kMostId);
  if (!prompt) return tl::unexpected(prompt.error());
  if (prompt->empty()) return prompt_line.error(prompt_field, "a prompt has at least one token");
  const auto output = output_line.integers(output_field, 0, kMostId);
  if (!output) return tl::unexpected(output.error());
  if (prompt->size() + output->size() > Tokens::kMaxSize)
    return output_line.error(output_field, "prompt and output have more than 2^24 tokens");
  std::vector<std::uint32_t> ids(prompt->begin(), prompt->end());
  ids.insert(ids.end(), output->begin(), output->end());
  request.tokens = Tokens::of_ids(std::move(ids));
  request.prompt_size = static_cast<std::uint32_t>(prompt->size());
  return {};
}

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

}  // namespace lockstep::cache_sim
