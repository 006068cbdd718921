#include "cache_sim/logs/truth.hpp"

#include <fmt/format.h>

#include "cache_sim/base/json_documents.hpp"
#include "reference/base/counted.hpp"

namespace lockstep::cache_sim {
namespace {

Result<Truth> read_truth(const Record& line) {
  const auto prompt = line.token_ids("prompt");
  if (!prompt) return tl::unexpected(prompt.error());
  if (prompt->empty()) return line.error("prompt", "a prompt has at least one token");
  const auto output = line.token_ids("output");
  if (!output) return tl::unexpected(output.error());
  if (prompt->size() + output->size() > Tokens::kMaxSize)
    return line.error("prompt", "has more than 2^24 tokens, with the output");
  auto gaps = line.numbers("gaps");
  if (!gaps) return tl::unexpected(gaps.error());
  if (gaps->size() != output->size())
    return line.error("gaps",
                      fmt::format("{} for {} of the output", counted(gaps->size(), "number"),
                                  counted(output->size(), "token")));
  Truth truth;
  truth.tokens = Tokens::of_ids({prompt->begin(), prompt->end()})
                     .followed_by(Tokens::of_ids({output->begin(), output->end()}));
  truth.prompt_size = static_cast<std::uint32_t>(prompt->size());
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
    const std::uint32_t size = truth->prompt_size;
    const Following above = all.find(truth->tokens, size);
    if (above.truth != nullptr && above.at == 0)
      return fail(
          fmt::format("{}: the truth of this prompt stands above ({})", place, above.truth->place));
    truth->place = place;
    const auto kept = std::make_shared<const Truth>(std::move(*truth));
    for (std::uint32_t at = 0; at == 0 || at < kept->gaps.size(); ++at)
      all.following_.emplace(std::pair{size + at, kept->tokens.digest(size + at)},
                             Following{kept, at});
  }
  if (all.following_.empty()) return fail(path + ": holds no truth");
  return all;
}

Truths::Following Truths::find(const Tokens& tokens, std::uint32_t size) const {
  if (following_.empty()) return {};
  Following best;
  const auto [begin, end] = following_.equal_range({size, tokens.digest(size)});
  for (auto one = begin; one != end; ++one) {
    const Following& known = one->second;
    if ((best.truth == nullptr || known.at < best.at) &&
        known.truth->tokens.prefix(size) == tokens.prefix(size))
      best = known;
  }
  return best;
}

}  // namespace lockstep::cache_sim
