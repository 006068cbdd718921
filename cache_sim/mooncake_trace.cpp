// Mooncake's traces (FAST'25 release), a line a request:
//   {"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [id, …]}
// One id per 512 tokens of the prompt, the last one perhaps for less. Ids are chained: each stands
// for the whole prompt up to its block's end.
#include <fmt/format.h>

#include "cache_sim/block_tokens.hpp"
#include "cache_sim/workload.hpp"

namespace lockstep::cache_sim {
namespace {

constexpr std::uint32_t kBlock = 512;
constexpr Nanoseconds kMillisecond = 1'000'000;

class MooncakeStream final : public RequestStream {
 public:
  explicit MooncakeStream(std::unique_ptr<JsonDocuments> documents)
      : documents_(std::move(documents)) {}

  std::uint32_t block_size() const override { return kBlock; }
  bool knows_outputs() const override { return false; }

  Result<bool> next(RequestSpec& spec) override {
    const Result<const nlohmann::json*> line = documents_->next();
    if (!line) return tl::unexpected(line.error());
    if (*line == nullptr) return false;
    const Record record(**line, documents_->place());
    const auto arrival = record.time("timestamp", kMillisecond);
    if (!arrival) return tl::unexpected(arrival.error());
    if (*arrival < latest_) return record.error("timestamp", "is before that of an earlier line");
    const auto input = record.integer("input_length", 1, Tokens::kMaxSize - 1);
    if (!input) return tl::unexpected(input.error());
    const auto output = record.integer("output_length", 0, Tokens::kMaxSize - *input);
    if (!output) return tl::unexpected(output.error());
    const auto ids = record.integers("hash_ids", 0, std::numeric_limits<std::int64_t>::max());
    if (!ids) return tl::unexpected(ids.error());
    if (static_cast<std::int64_t>(ids->size()) != block_count(*input, kBlock))
      return record.error(
          "hash_ids", fmt::format("{} ids for {} tokens, which are {} blocks of {}", ids->size(),
                                  *input, block_count(*input, kBlock), kBlock));
    // At least one token is sampled, or no server would be asked.
    Result<Tokens> tokens = blocks_.of(*ids, *input, std::max<std::int64_t>(*output, 1), count_);
    if (!tokens) return record.error("hash_ids", tokens.error().text);
    spec = {.id = request_name(count_++),
            .tokens = std::move(*tokens),
            .prompt_size = static_cast<std::uint32_t>(*input),
            .at = *arrival};
    latest_ = *arrival;
    return true;
  }

 private:
  std::unique_ptr<JsonDocuments> documents_;
  BlockTokens blocks_{kBlock, true};
  std::int64_t count_ = 0;
  Nanoseconds latest_ = 0;
};

bool recognises(const nlohmann::json& first) {
  return first.contains("hash_ids") && first.contains("timestamp") && !first.contains("chat_id");
}

OpenedStream open(std::unique_ptr<JsonDocuments> documents) {
  return std::make_unique<MooncakeStream>(std::move(documents));
}

const Registration<WorkloadFormat> kMooncake{
    {"mooncake", "JSONL: timestamp (ms), input_length, output_length, hash_ids of 512 tokens",
     recognises, open}};

}  // namespace
}  // namespace lockstep::cache_sim
