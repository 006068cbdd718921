// Alibaba's qwen-bailian-usagetraces-anon, one line for each turn of a chat:
//   {"chat_id": n, "parent_chat_id": n or -1, "timestamp": s, "input_length": tokens,
//    "output_length": tokens, "type": "text", "turn": n, "hash_ids": [id, …]}
// There is one id for each 16 tokens of the prompt; ids are chained, and the last block may hold
// padding. A turn names the turn before it, which is an earlier line of the file.
#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <unordered_map>

#include "cache_sim/workloads/block_tokens.hpp"
#include "cache_sim/workloads/workload.hpp"

namespace lockstep::cache_sim {
namespace {

class BailianStream final : public RequestStream {
  static constexpr std::uint32_t kBlock = 16;

 public:
  explicit BailianStream(std::unique_ptr<JsonDocuments> documents)
      : documents_(std::move(documents)) {}

  std::uint32_t block_size() const override { return kBlock; }
  bool knows_outputs() const override { return false; }

  Result<bool> next(RequestSpec& spec) override {
    const Result<const nlohmann::json*> line = documents_->next();
    if (!line) return tl::unexpected(line.error());
    if (*line == nullptr) return false;
    const Record record(**line, documents_->place());
    const Result<std::int64_t> chat = first_turn_of(record);
    if (!chat) return tl::unexpected(chat.error());
    Result<RequestSpec> request = lines_.read(record);
    if (!request) return tl::unexpected(request.error());
    spec = std::move(*request);
    spec.session = Name::intern(fmt::format("chat{}", *chat));
    return true;
  }

 private:
  /// The id of the first turn of the chat that a turn belongs to.
  Result<std::int64_t> first_turn_of(const Record& record) {
    auto chat = record.integer("chat_id", 0, kMostInteger);
    if (!chat) return chat;
    auto parent = record.integer("parent_chat_id", -1, kMostInteger);
    if (!parent) return parent;
    std::int64_t first = *chat;
    if (*parent != -1) {
      const auto known = first_turns_.find(*parent);
      if (known == first_turns_.end())
        return record.error("parent_chat_id",
                            fmt::format("no line before this one has the chat_id {}", *parent));
      first = known->second;
    }
    if (!first_turns_.emplace(*chat, first).second)
      return record.error("chat_id", fmt::format("{} stands in an earlier line", *chat));
    return first;
  }

  std::unique_ptr<JsonDocuments> documents_;
  BlockLines lines_{kBlock, kSecond, -kMostInteger};
  std::unordered_map<std::int64_t, std::int64_t> first_turns_;
};

bool is_bailian(const nlohmann::json& first) {
  return first.contains("hash_ids") && first.contains("chat_id");
}

OpenedStream open_bailian(std::unique_ptr<JsonDocuments> documents) {
  return std::make_unique<BailianStream>(std::move(documents));
}

const Registration<WorkloadFormat> kBailian{{"qwen-bailian",
                                             "JSONL: chat_id, parent_chat_id, timestamp (s), "
                                             "input_length, output_length, hash_ids of 16 tokens",
                                             is_bailian, open_bailian}};

}  // namespace
}  // namespace lockstep::cache_sim
