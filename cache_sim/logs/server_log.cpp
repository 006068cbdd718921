#include "cache_sim/logs/server_log.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <unordered_map>

#include "cache_sim/base/prefix_trie.hpp"
#include "cache_sim/trace/trace.hpp"
#include "reference/base/counted.hpp"

namespace lockstep::cache_sim {

std::string LogPlace::text() const {
  return fmt::format("{}:{}", file, line);
}

Result<std::vector<LoggedRequest>> read_log(const std::string& path) {
  Result<std::unique_ptr<JsonDocuments>> documents = JsonDocuments::open(path);
  if (!documents) return tl::unexpected(documents.error());
  const LogFormat* format = nullptr;
  std::vector<LoggedRequest> log;
  std::set<std::string> ids;
  for (;;) {
    const Result<const nlohmann::json*> line = (*documents)->next();
    if (!line && log.empty() && path.ends_with(".trace"))
      return fail(path + ": a trace is no log; `lockstep replay` plays it");
    if (!line) return tl::unexpected(line.error());
    if (*line == nullptr) break;
    const Record record(**line, (*documents)->place());
    if (format == nullptr)
      for (const LogFormat& one : Registry<LogFormat>::all())
        if (one.recognises(**line)) format = Registry<LogFormat>::find(one.name);
    if (format == nullptr)
      return fail((*documents)->place() + ": its fields are those of no known log");
    Result<LoggedRequest> request = format->read(record);
    if (!request) return tl::unexpected(request.error());
    request->place = {(*documents)->path(), (*documents)->line()};
    if (!ids.insert(request->id).second)
      return fail(fmt::format("{}: a request `{}` stands above", request->place.text(),
                              request->id.substr(0, 60)));
    if (!log.empty() && (log.front().start < 0) != (request->start < 0))
      return fail(request->place.text() + ": field start: all requests have times, or none");
    log.push_back(std::move(*request));
  }
  if (log.empty()) return fail(path + ": the log holds no request");
  return log;
}

// --- Judging -------------------------------------------------------------------------------------

namespace {

/// The tokens whose KV a request can leave behind: all but the last sampled one, which no step has
/// computed.
Tokens left_behind(const LoggedRequest& request) {
  return request.tokens.prefix(std::max(request.prompt_size, request.tokens.size() - 1));
}

/// A trie of the tokens that the requests of a log left behind. Each node knows the first two
/// requests, by order of beginning, that left its prefix; at least one of the two is another
/// request than the one that asks.
class LeftBehind final : private PrefixTrie::SplitListener {
 public:
  /// Adds the request at place `k` of the order; call it with k = 0, 1, 2, …
  void add(const LoggedRequest& request, std::size_t k) {
    PrefixTrie::Index node = trie_.insert(left_behind(request), request.salt, this);
    owners_.resize(trie_.node_count());
    for (; node != PrefixTrie::kNone; node = trie_.node(node).parent) {
      Owners& owners = owners_[node];
      if (owners.second != kNoRequest) return;  // its parents have two owners as well
      (owners.first == kNoRequest ? owners.first : owners.second) = k;
    }
  }

  /// The longest prefix of the prompt that was left by another one of the first `count` requests.
  /// The asking request is the one at place `k`.
  std::uint32_t longest_of_others(const LoggedRequest& request, std::size_t k,
                                  std::size_t count) const {
    const Tokens prompt = request.tokens.prefix(request.prompt_size);
    const PrefixTrie::Match match = trie_.match(prompt, request.salt);
    PrefixTrie::Index node = match.into != PrefixTrie::kNone ? match.into : match.node;
    for (; node != PrefixTrie::kNone; node = trie_.node(node).parent) {
      const Owners& owners = owners_[node];
      if ((owners.first == k ? owners.second : owners.first) < count)
        return std::min(trie_.node(node).end, match.size);
    }
    return 0;
  }

 private:
  static constexpr std::size_t kNoRequest = std::numeric_limits<std::size_t>::max();
  struct Owners {
    std::size_t first = kNoRequest;
    std::size_t second = kNoRequest;
  };

  void split(PrefixTrie::Index above, PrefixTrie::Index below) override {
    owners_.resize(trie_.node_count());
    owners_[above] = owners_[below];
  }

  PrefixTrie trie_;
  std::vector<Owners> owners_;  // by node of trie_
};

/// The longest hit that each request can have had: the longest prefix of its prompt that was left
/// by another request which had begun before this one ended. (A server may serve a later request
/// first.)
std::vector<std::uint32_t> bounds_of(const std::vector<LoggedRequest>& log) {
  std::vector<std::size_t> order(log.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::ranges::stable_sort(
      order, [&](std::size_t a, std::size_t b) { return log[a].start < log[b].start; });
  LeftBehind all;
  for (std::size_t k = 0; k < order.size(); ++k) all.add(log[order[k]], k);
  std::vector<std::uint32_t> bounds(log.size());
  for (std::size_t k = 0; k < order.size(); ++k) {
    const LoggedRequest& request = log[order[k]];
    const auto begun = std::partition_point(
        order.begin(), order.end(), [&](std::size_t i) { return log[i].start < request.end; });
    const auto count = std::max(k, static_cast<std::size_t>(begun - order.begin()));
    bounds[order[k]] = all.longest_of_others(request, k, count);
  }
  return bounds;
}

void judge_cached(const LoggedRequest& request, std::uint32_t bound,
                  std::vector<LogFinding>& findings) {
  const auto add = [&](const std::string& text, std::int64_t most) {
    findings.push_back({request.place,
                        request.id,
                        {FindingKind::cached_too_much, text, fmt::format("at most {}", most),
                         std::to_string(request.cached)}});
  };
  if (request.cached >= request.prompt_size)
    return add(fmt::format("the whole prompt of {} is said to be cached, so none is left whose "
                           "output could be sampled",
                           counted(request.prompt_size, "token")),
               request.prompt_size - 1);
  if (request.cached > bound)
    add(fmt::format("{} {} said to be cached, and no request that had begun can have left more "
                    "than {} of them",
                    counted(request.cached, "token"), is_or_are(request.cached), bound),
        bound);
}

/// Checks greedy outputs, which are a function of the tokens before them. An output is compared
/// with what a truth says after its prompt; where none does, with the first request that had the
/// same tokens before it, found by their digest.
class OutputJudge {
 public:
  explicit OutputJudge(const Truths& truths) : truths_(truths) {}

  void judge(const LoggedRequest& request, LogVerdict& verdict) {
    ++verdict.greedy;
    const Truths::Following known = truths_.find(request.tokens, request.prompt_size);
    if (known.truth == nullptr) return compare_requests(request, verdict);
    ++verdict.with_truth;
    compare_with(*known.truth, request, verdict);
  }

 private:
  /// Compares up to the first token that differs. After it, the two outputs continue different
  /// texts.
  void compare_with(const Truth& truth, const LoggedRequest& request, LogVerdict& verdict) {
    const std::uint32_t both = std::min(truth.tokens.size(), request.tokens.size());
    for (std::uint32_t at = request.prompt_size; at < both; ++at) {
      ++verdict.tokens;
      if (request.tokens[at] == truth.tokens[at]) continue;
      const double gap = truth.gaps[at - truth.prompt_size];
      if (gap < truths_.gap_min()) {
        ++verdict.near_ties;
        return;
      }
      verdict.findings.push_back(
          {request.place,
           request.id,
           {FindingKind::output_differs,
            fmt::format("after {}, {} of them of its prompt and {} cached, `{}` says {}; after the "
                        "same tokens an empty cache says {}, which leads by {:.4g} ({})",
                        counted(at, "token"), request.prompt_size, request.cached, request.id,
                        request.tokens[at], truth.tokens[at], gap, truth.place),
            std::to_string(truth.tokens[at]), std::to_string(request.tokens[at])}});
      return;
    }
  }

  void compare_requests(const LoggedRequest& request, LogVerdict& verdict) {
    const std::uint64_t salt = request.salt.index();
    for (std::uint32_t at = request.prompt_size; at < request.tokens.size(); ++at) {
      const std::uint64_t before = mix64(request.tokens.digest(at) ^ mix64(salt)) ^ at;
      const auto [said, first] = said_.try_emplace(before, Said{request.tokens[at], &request});
      verdict.tokens += first ? 0 : 1;
      if (said->second.token == request.tokens[at]) continue;
      const LoggedRequest& other = *said->second.by;
      verdict.findings.push_back(
          {request.place,
           request.id,
           {FindingKind::output_differs,
            fmt::format(
                "after the same {}, `{}` ({} cached) says {} and `{}` ({} cached, {}) says {}",
                counted(at, "token"), request.id, request.cached, request.tokens[at], other.id,
                other.cached, other.place.text(), said->second.token),
            std::to_string(said->second.token), std::to_string(request.tokens[at])}});
      return;
    }
  }

  struct Said {
    Token token;
    const LoggedRequest* by;
  };
  const Truths& truths_;
  std::unordered_map<std::uint64_t, Said> said_;
};

}  // namespace

LogVerdict judge_log(const std::vector<LoggedRequest>& log, const Truths& truths) {
  LogVerdict verdict;
  const std::vector<std::uint32_t> bounds = bounds_of(log);
  OutputJudge outputs(truths);
  for (std::size_t i = 0; i < log.size(); ++i) {
    judge_cached(log[i], bounds[i], verdict.findings);
    if (log[i].greedy) outputs.judge(log[i], verdict);
  }
  return verdict;
}

// --- Writing -------------------------------------------------------------------------------------

std::string log_text(const std::vector<LoggedRequest>& log) {
  std::string text;
  for (const LoggedRequest& request : log) {
    nlohmann::ordered_json line = {
        {"id", request.id},
        {"prompt", request.tokens.prefix(request.prompt_size).values()},
        {"output", request.tokens.slice(request.prompt_size, request.tokens.size()).values()},
        {"cached", request.cached}};
    if (request.salt.exists()) line["salt"] = request.salt.text();
    if (request.start >= 0) {
      line["start"] = static_cast<double>(request.start) / static_cast<double>(kSecond);
      line["end"] = static_cast<double>(request.end) / static_cast<double>(kSecond);
    }
    if (request.greedy) line["greedy"] = true;
    text += line.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
  }
  return text;
}

Result<std::string> log_trace(const std::vector<LoggedRequest>& log) {
  std::vector<const LoggedRequest*> order;
  order.reserve(log.size());
  for (const LoggedRequest& request : log) order.push_back(&request);
  std::ranges::stable_sort(order, [](const auto* a, const auto* b) { return a->start < b->start; });
  std::string text = "# From a server's log: what it said of each request is what is expected.\n";
  std::string expected;
  for (const LoggedRequest* const request : order) {
    const Tokens output = request->tokens.slice(request->prompt_size, request->tokens.size());
    std::string line = fmt::format("request id={} tokens={} output={}", request->id,
                                   request->tokens.prefix(request->prompt_size).text(),
                                   output.empty() ? std::string("1") : output.text());
    if (request->start >= 0) line += fmt::format(" at={}ns", request->start);
    if (request->salt.exists()) line += " salt=" + request->salt.text();
    if (line.size() > kMaxLineSize)
      return fail(request->place.text() + ": its line of a trace would be longer than 1 MiB");
    text += line + "\n";
    const std::string said =
        fmt::format("expect id={}\n----\ncached={}\n", request->id, request->cached);
    // In a log without times, each request is answered before the next one is sent.
    if (request->start < 0)
      text += "run\n" + said;
    else
      expected += said;
  }
  return expected.empty() ? text : text + "run\n" + expected;
}

}  // namespace lockstep::cache_sim
