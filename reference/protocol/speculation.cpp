#include "reference/protocol/speculation.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "reference/base/philox.hpp"

namespace lockstep {
namespace {

constexpr std::int64_t kMostDrafts = 1024;

}  // namespace

Result<Speculation> parse_speculation(std::string_view text) {
  std::vector<std::string_view> parts;
  for (std::string_view rest = text;;) {
    const std::size_t colon = std::min(rest.find(':'), rest.size());
    parts.push_back(rest.substr(0, colon));
    if (colon == rest.size()) break;
    rest.remove_prefix(colon + 1);
  }
  if (parts.size() < 3 || parts.size() > 4 || (parts[0] != "chain" && parts[0] != "ngram"))
    return fail(fmt::format("`{}` is neither chain:DRAFTS:PERMILLE[:SEED] nor ngram:…",
                            text.substr(0, 60)));
  Speculation speculation;
  speculation.kind = parts[0] == "chain" ? Speculation::Kind::chain : Speculation::Kind::ngram;
  const Result<std::int64_t> drafts = parse_integer(parts[1], 1, kMostDrafts);
  if (!drafts) return tl::unexpected(drafts.error());
  const Result<std::int64_t> accepted = parse_integer(parts[2], 0, 1000);
  if (!accepted) return tl::unexpected(accepted.error());
  speculation.drafts = *drafts;
  speculation.accepted = *accepted;
  if (parts.size() == 3) return speculation;
  const Result<std::int64_t> seed =
      parse_integer(parts[3], 0, std::numeric_limits<std::int64_t>::max());
  if (!seed) return tl::unexpected(seed.error());
  speculation.seed = static_cast<std::uint64_t>(*seed);
  return speculation;
}

void speculate(RequestSpec& request, const Speculation& speculation, std::uint64_t stream) {
  if (speculation.drafts == 0) return;
  std::uint64_t index = 0;
  const auto below = [&](std::int64_t bound) {
    return static_cast<std::int64_t>(
        random_below(static_cast<std::uint64_t>(bound), speculation.seed, stream, index++));
  };
  // The first token comes out of the prompt's last chunk.
  for (std::int64_t sampled = 1; sampled < request.output_size();) {
    const std::int64_t drafts = speculation.kind == Speculation::Kind::chain
                                    ? speculation.drafts
                                    : below(speculation.drafts + 1);
    const std::int64_t most = request.most_kept(drafts);
    std::int64_t kept = 1;
    while (kept < most && below(1000) < speculation.accepted) ++kept;
    request.drafts.push_back(drafts);
    request.accept.push_back(kept);
    sampled += kept;
  }
}

}  // namespace lockstep
