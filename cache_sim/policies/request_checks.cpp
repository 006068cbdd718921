#include "cache_sim/policies/request_checks.hpp"
#include "reference/base/counted.hpp"

#include <fmt/format.h>

namespace lockstep::cache_sim {

tl::unexpected<Error> no_such_request(const Operation& operation) {
  return fail(fmt::format("{}: no admitted request is called `{}` here", to_string(operation.verb),
                          operation.id.text()));
}

bool discards(const Operation& operation) {
  return operation.verb == Verb::abort || operation.verb == Verb::preempt ||
         (operation.verb == Verb::finish && !operation.insert);
}

Result<void> check_admission(const Operation& admit, bool is_admitted) {
  if (is_admitted)
    return fail(fmt::format("admit: request `{}` is admitted already", admit.id.text()));
  if (admit.tokens.empty()) return fail("admit: a request has at least one token");
  if (admit.prompt > std::int64_t{admit.tokens.size()})
    return fail("admit: the prompt is longer than the tokens");
  return {};
}

Result<void> check_extend(const Operation& extend, std::int64_t left) {
  const bool takes_all = extend.drafts.empty() || extend.n == left;
  if (extend.n < 1 || extend.n > left || !takes_all)
    return fail(fmt::format("extend: n={} does not fit the {} that request `{}` has left", extend.n,
                            counted(left, "token"), extend.id.text()));
  return {};
}

Result<void> check_is_settled(const Operation& operation, bool is_verifying) {
  if (is_verifying)
    return fail(fmt::format("{}: request `{}` has drafts that wait for their accept",
                            to_string(operation.verb), operation.id.text()));
  return {};
}

Result<std::uint32_t> check_mapping(const std::vector<std::int64_t>& mapping,
                                    const std::vector<RowUse>& rows) {
  if (mapping.size() != rows.size())
    return fail(fmt::format("compact: {} for {}", counted(mapping.size(), "number"),
                            counted(rows.size(), "row")));
  std::vector<bool> taken(rows.size());
  std::uint32_t kept = 0;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const bool hole = rows[i] == RowUse::hole;
    if (hole != (mapping[i] == -1))
      return fail(fmt::format("compact: row {} is {}, and becomes {}", i,
                              hole ? "a hole" : "a request's", mapping[i]));
    if (hole) continue;
    ++kept;
    const auto row = static_cast<std::size_t>(mapping[i]);
    if (mapping[i] < 0 || row >= rows.size() || taken[row])
      return fail(fmt::format("compact: row {} cannot become {}", i, mapping[i]));
    if (rows[i] == RowUse::verifying)
      return fail(fmt::format("compact: row {} has drafts that wait for their accept", i));
    taken[row] = true;
  }
  for (std::uint32_t row = 0; row < kept; ++row)
    if (!taken[row]) return fail(fmt::format("compact: no row becomes {}", row));
  return kept;
}

Result<void> check_accept(const Operation& accept) {
  if (accept.n != std::int64_t{accept.tokens.size()})
    return fail(
        fmt::format("accept: n={} beside {}", accept.n, counted(accept.tokens.size(), "token")));
  return {};
}

Result<void> check_kept(const Operation& accept, const Tokens& drafts) {
  const std::uint32_t count = accept.tokens.size();
  if (count < 1 || count > drafts.size() + 1)
    return fail(fmt::format("accept: n={} is not within 1 … {} (the drafts and one more)", count,
                            drafts.size() + 1));
  if (accept.tokens.prefix(count - 1) != drafts.prefix(count - 1))
    return fail("accept: the tokens kept are not the drafts");
  return {};
}

}  // namespace lockstep::cache_sim
