#include "cache_sim/logs/truth.hpp"

#include <fmt/format.h>

#include <limits>

#include "cache_sim/base/json_documents.hpp"
#include "reference/base/counted.hpp"

namespace lockstep::cache_sim {
namespace {

constexpr std::int64_t kMostId = std::numeric_limits<std::uint32_t>::max();

Result<Truth> read_truth(const Record& line) {
  const auto prompt = line.integers("prompt", 0, kMostId);
  if (!prompt) return tl::unexpected(prompt.error());
  if (prompt->empty()) return line.error("prompt", "a prompt has at least one token");
  if (prompt->size() > Tokens::kMaxSize) return line.error("prompt", "has more than 2^24 tokens");
  const auto output = line.integers("output", 0, kMostId);
  if (!output) return tl::unexpected(output.error());
  auto gaps = line.numbers("gaps");
  if (!gaps) return tl::unexpected(gaps.error());
  if (gaps->size() != output->size())
    return line.error("gaps",
                      fmt::format("{} for {} of the output", counted(gaps->size(), "number"),
                                  counted(output->size(), "token")));
  Truth truth;
  truth.prompt = Tokens::of_ids({prompt->begin(), prompt->end()});
  truth.output.assign(output->begin(), output->end());
  truth.gaps = std::move(*gaps);
  return truth;
}

}  // namespace

Result<Truths> Truths::read(const std::string& path, double gap_min) {
  Result<std::unique_ptr<JsonDocuments>> documents = JsonDocuments::open(path);
  if (!documents) return tl::unexpected(documents.error());
  Truths all;
  all.gap_min_ = gap_min;
  for (;;) {
    const Result<const nlohmann::json*> line = (*documents)->next();
    if (!line) return tl::unexpected(line.error());
    if (*line == nullptr) break;
    const std::string place = (*documents)->place();
    Result<Truth> truth = read_truth(Record(**line, place));
    if (!truth) return tl::unexpected(truth.error());
    if (const Truth* const above = all.find(truth->prompt, truth->prompt.size()))
      return fail(
          fmt::format("{}: the truth of this prompt stands above ({})", place, above->place));
    truth->place = place;
    const std::pair<std::uint32_t, std::uint64_t> key = {truth->prompt.size(),
                                                         truth->prompt.digest()};
    all.truths_.emplace(key, std::move(*truth));
  }
  if (all.truths_.empty()) return fail(path + ": holds no truth");
  return all;
}

const Truth* Truths::find(const Tokens& tokens, std::uint32_t prompt_size) const {
  if (truths_.empty()) return nullptr;
  const auto [begin, end] = truths_.equal_range({prompt_size, tokens.digest(prompt_size)});
  for (auto one = begin; one != end; ++one)
    if (one->second.prompt == tokens.prefix(prompt_size)) return &one->second;
  return nullptr;
}

}  // namespace lockstep::cache_sim
