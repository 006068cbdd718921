// LLMServingSim's workloads, one line for each request or each session of an agent:
//   {"input_toks": n, "output_toks": n, "arrival_time_ns": t,
//    ["input_tok_ids": [id, …], "output_tok_ids": [id, …]]}
//   {"session_id": text, "arrival_time_ns": t, "sub_requests": [
//     {"input_toks": n, "output_toks": n, ["input_tok_ids": …, "output_tok_ids": …,]
//      "tool_duration_ns": t}]}
// A prompt without ids shares nothing with other requests. In a session, a request arrives when the
// request before it has been answered and its tool has run. The time of an answer is taken to be
// kTokenTime for each token, because a stream does not know the server.
#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <unordered_set>

#include "cache_sim/workloads/arrival_queue.hpp"
#include "cache_sim/workloads/workload.hpp"
#include "reference/base/counted.hpp"

namespace lockstep::cache_sim {
namespace {

constexpr Nanoseconds kTokenTime = 20'000'000;
class LlmServingSimStream final : public RequestStream {
 public:
  explicit LlmServingSimStream(std::unique_ptr<JsonDocuments> documents)
      : documents_(std::move(documents)) {}

  Result<bool> next(RequestSpec& spec) override {
    // Lines are in order of arrival: a line that has not been read arrives after `latest_`.
    while (!at_end_ && (queue_.empty() || latest_ <= queue_.earliest())) {
      Result<bool> read = read_line();
      if (!read) return read;
    }
    if (queue_.empty()) return false;
    spec = queue_.pop();
    return true;
  }

 private:
  Result<bool> read_line() {
    const Result<const nlohmann::json*> line = documents_->next();
    if (!line) return tl::unexpected(line.error());
    at_end_ = *line == nullptr;
    if (at_end_) return false;
    const Record record(**line, documents_->place());
    const auto arrival = record.time("arrival_time_ns", 1);
    if (!arrival) return tl::unexpected(arrival.error());
    if (*arrival < latest_)
      return record.error("arrival_time_ns", "is before that of an earlier line");
    latest_ = *arrival;
    if (!record.has("sub_requests"))
      return read_request(record, Name(), *arrival).map([](auto) { return true; });
    const Result<std::string> session = record.text("session_id");
    if (!session) return tl::unexpected(session.error());
    if (session->empty()) return record.error("session_id", "is empty");
    if (!sessions_.insert(*session).second)
      return record.error("session_id",
                          fmt::format("an earlier session is called `{}`", session->substr(0, 60)));
    return read_session(record, Name::intern(*session), *arrival);
  }

  Result<bool> read_session(const Record& record, Name session, Nanoseconds at) {
    const Result<std::vector<Record>> requests = record.objects("sub_requests");
    if (!requests) return tl::unexpected(requests.error());
    for (const Record& request : *requests) {
      const Result<std::int64_t> output = read_request(request, session, at);
      if (!output) return tl::unexpected(output.error());
      at += *output * kTokenTime;
      if (at > kLatestTime)
        return request.error("output_toks",
                             "its answer ends later than 2^62 ns, which is 146 years");
      if (!request.has("tool_duration_ns")) continue;
      const auto next = request.time_after(at, "tool_duration_ns", 1);
      if (!next) return tl::unexpected(next.error());
      at = *next;
    }
    return true;
  }

  /// Queues a request and returns the number of its output tokens.
  Result<std::int64_t> read_request(const Record& record, Name session, Nanoseconds at) {
    auto input = record.integer("input_toks", 1, Tokens::kMaxSize - 1);
    if (!input) return input;
    auto output = record.integer("output_toks", 0, Tokens::kMaxSize - *input);
    if (!output) return output;
    const auto size = std::max<std::int64_t>(*output, 1);
    const Document own = kOutputDocuments + static_cast<Document>(count_);
    Tokens tokens = Tokens::of_document(own, 0, static_cast<std::uint32_t>(*input + size));
    for (const bool is_output : {false, true}) {
      const std::string_view field = is_output ? "output_tok_ids" : "input_tok_ids";
      if (!record.has(field)) continue;
      const auto ids = record.token_ids(field);
      if (!ids) return tl::unexpected(ids.error());
      const std::int64_t due = is_output ? *output : *input;
      if (static_cast<std::int64_t>(ids->size()) != due)
        return record.error(
            field, fmt::format("{} for {}", counted(ids->size(), "id"), counted(due, "token")));
      if (ids->empty()) continue;
      const Tokens known = Tokens::of_ids({ids->begin(), ids->end()});
      const auto prompt = static_cast<std::uint32_t>(*input);
      tokens = is_output ? tokens.prefix(prompt).followed_by(known)
                         : known.followed_by(tokens.slice(prompt, tokens.size()));
    }
    queue_.push({.number = count_++,
                 .session = session,
                 .tokens = std::move(tokens),
                 .prompt_size = static_cast<std::uint32_t>(*input),
                 .at = at});
    return *output;
  }

  std::unique_ptr<JsonDocuments> documents_;
  std::unordered_set<std::string> sessions_;
  ArrivalQueue queue_;
  Nanoseconds latest_ = 0;  // arrival of the last line that was read
  std::int64_t count_ = 0;
  bool at_end_ = false;
};

bool is_llmservingsim(const nlohmann::json& first) {
  return first.contains("input_toks") || first.contains("sub_requests");
}

OpenedStream open_llmservingsim(std::unique_ptr<JsonDocuments> documents) {
  return std::make_unique<LlmServingSimStream>(std::move(documents));
}

const Registration<WorkloadFormat> kLlmServingSim{
    {"llmservingsim", "JSONL: input_toks, output_toks, arrival_time_ns, token ids; sub_requests",
     is_llmservingsim, open_llmservingsim}};

}  // namespace
}  // namespace lockstep::cache_sim
