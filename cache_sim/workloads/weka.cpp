// Weka's agentic traces, one JSON document for each session:
//   {"id": text, "block_size": tokens, "hash_id_scope": "local", "requests": [
//     {"t": s, "type": "n" or "s", "in": tokens, "out": tokens, "hash_ids": [id, …], …},
//     {"t": s, "type": "subagent", "requests": [ … ]}]}
// Times count from the start of the session. The requests of a sub-agent are a fork: they share the
// blocks that they name with the session, and the session goes on without them. Ids of different
// sessions are different blocks. The end of a prompt may have no id.
//
// The files do not say how the sessions overlap in time. So kSeats sessions run side by side, and
// the next session of the file begins when one of them ends.
#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <unordered_set>

#include "cache_sim/workloads/arrival_queue.hpp"
#include "cache_sim/workloads/block_tokens.hpp"
#include "cache_sim/workloads/workload.hpp"
#include "reference/base/counted.hpp"

namespace lockstep::cache_sim {
namespace {

constexpr std::size_t kSeats = 8;

class WekaStream final : public RequestStream {
 public:
  WekaStream(std::unique_ptr<JsonDocuments> documents, std::uint32_t block)
      : documents_(std::move(documents)), block_(block), blocks_(block, false) {}

  std::uint32_t block_size() const override { return block_; }
  bool knows_outputs() const override { return false; }

  Result<bool> next(RequestSpec& spec) override {
    // A seat whose session ends before all known arrivals takes the next session of the file.
    while (!at_end_ && (seats_.size() < kSeats || earliest_seat() <= next_arrival())) {
      Result<bool> read = read_session();
      if (!read) return read;
    }
    if (queue_.empty()) return false;
    spec = queue_.pop();
    return true;
  }

 private:
  Nanoseconds earliest_seat() const { return *std::ranges::min_element(seats_); }
  Nanoseconds next_arrival() const { return queue_.empty() ? kMostInteger : queue_.earliest(); }

  Result<bool> read_session() {
    const Result<const nlohmann::json*> document = documents_->next();
    if (!document) return tl::unexpected(document.error());
    at_end_ = *document == nullptr;
    if (at_end_) return false;
    const Record session(**document, documents_->place());
    const Result<std::string> id = session.text("id");
    if (!id) return tl::unexpected(id.error());
    if (id->empty()) return session.error("id", "is empty");
    if (!ids_.insert(*id).second)
      return session.error("id",
                           fmt::format("an earlier session is called `{}`", id->substr(0, 60)));
    const auto block = session.integer("block_size", 1, 1 << 20);
    if (!block) return tl::unexpected(block.error());
    if (*block != block_)
      return session.error("block_size", fmt::format("{} here and {} before", *block, block_));
    const Result<std::string> scope = session.text("hash_id_scope");
    if (!scope) return tl::unexpected(scope.error());
    if (*scope != "local")
      return session.error("hash_id_scope",
                           fmt::format("`{}` is not `local`", scope->substr(0, 60)));
    if (seats_.size() < kSeats) seats_.push_back(0);
    Nanoseconds& seat = *std::ranges::min_element(seats_);
    blocks_.forget();
    const Nanoseconds start = seat;
    return read_requests(session, {Name::intern(*id), start, &seat}, start);
  }

  struct Session {
    Name id;
    Nanoseconds start;
    Nanoseconds* end;  // the latest arrival of the session so far
  };

  /// Reads the requests of a session or, with times from `from` on, of a sub-agent.
  Result<bool> read_requests(const Record& parent, const Session& session, Nanoseconds from) {
    const Result<std::vector<Record>> requests = parent.objects("requests");
    if (!requests) return tl::unexpected(requests.error());
    for (const Record& request : *requests) {
      const auto time = request.time_after(session.start, "t", kSecond);
      if (!time) return tl::unexpected(time.error());
      if (*time < from)
        return request.error("t", "is before that of an earlier request, or of the sub-agent");
      from = *time;
      const Result<std::string> type = request.text("type");
      if (!type) return tl::unexpected(type.error());
      if (*type != "n" && *type != "s" && *type != "subagent")
        return request.error("type",
                             fmt::format("`{}` is none of n, s, subagent", type->substr(0, 60)));
      Result<bool> read = *type == "subagent" ? read_requests(request, session, from)
                                              : read_request(request, session, *time);
      if (!read) return read;
    }
    return true;
  }

  Result<bool> read_request(const Record& request, const Session& session, Nanoseconds at) {
    const auto input = request.integer("in", 1, Tokens::kMaxSize - 1);
    if (!input) return tl::unexpected(input.error());
    const auto output = request.integer("out", 0, Tokens::kMaxSize - *input);
    if (!output) return tl::unexpected(output.error());
    const auto ids = request.integers("hash_ids", -kMostInteger, kMostInteger);
    if (!ids) return tl::unexpected(ids.error());
    const auto count = static_cast<std::int64_t>(ids->size());
    if (count != block_count(*input, block_) && count != *input / block_)
      return request.error("hash_ids",
                           fmt::format("{} for {} in blocks of {}", counted(count, "id"),
                                       counted(*input, "token"), block_));
    Result<Tokens> tokens = blocks_.of(*ids, *input, std::max<std::int64_t>(*output, 1), count_);
    if (!tokens) return request.error("hash_ids", tokens.error().text);
    queue_.push({.number = count_++,
                 .session = session.id,
                 .tokens = std::move(*tokens),
                 .prompt_size = static_cast<std::uint32_t>(*input),
                 .at = at});
    *session.end = std::max(*session.end, at);
    return true;
  }

  std::unique_ptr<JsonDocuments> documents_;
  std::uint32_t block_;
  BlockTokens blocks_;
  std::unordered_set<std::string> ids_;
  std::vector<Nanoseconds> seats_;  // the end of each seat's session
  ArrivalQueue queue_;
  std::int64_t count_ = 0;
  bool at_end_ = false;
};

bool is_weka(const nlohmann::json& first) {
  return first.contains("requests") && (first.contains("block_size") || first.contains("models"));
}

OpenedStream open_weka(std::unique_ptr<JsonDocuments> documents) {
  const Result<const nlohmann::json*> first = documents->peek();
  if (!first) return tl::unexpected(first.error());
  const auto block = Record(**first, documents->place()).integer("block_size", 1, 1 << 20);
  if (!block) return tl::unexpected(block.error());
  return std::make_unique<WekaStream>(std::move(documents), static_cast<std::uint32_t>(*block));
}

const Registration<WorkloadFormat> kWeka{
    {"weka-agentic",
     "JSON, a document a session: id, block_size, requests with hash_ids, subagents", is_weka,
     open_weka}};

}  // namespace
}  // namespace lockstep::cache_sim
