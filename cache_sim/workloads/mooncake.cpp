// Mooncake's traces (FAST'25 release), one line for each request:
//   {"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [id, …]}
// There is one id for each 512 tokens of the prompt; the last one may stand for fewer. Ids are
// chained: each stands for the whole prompt up to the end of its block.
#include "cache_sim/workloads/block_tokens.hpp"

#include <nlohmann/json.hpp>
#include "cache_sim/workloads/workload.hpp"

namespace lockstep::cache_sim {
namespace {

class MooncakeStream final : public RequestStream {
  static constexpr std::uint32_t kBlock = 512;
  static constexpr Nanoseconds kMillisecond = 1'000'000;

 public:
  explicit MooncakeStream(std::unique_ptr<JsonDocuments> documents)
      : documents_(std::move(documents)) {}

  std::uint32_t block_size() const override { return kBlock; }
  bool knows_outputs() const override { return false; }

  Result<bool> next(RequestSpec& spec) override {
    const Result<const nlohmann::json*> line = documents_->next();
    if (!line) return tl::unexpected(line.error());
    if (*line == nullptr) return false;
    Result<RequestSpec> request = lines_.read(Record(**line, documents_->place()));
    if (!request) return tl::unexpected(request.error());
    spec = std::move(*request);
    return true;
  }

 private:
  std::unique_ptr<JsonDocuments> documents_;
  BlockLines lines_{kBlock, kMillisecond, 0};
};

bool is_mooncake(const nlohmann::json& first) {
  return first.contains("hash_ids") && first.contains("timestamp") && !first.contains("chat_id");
}

OpenedStream open_mooncake(std::unique_ptr<JsonDocuments> documents) {
  return std::make_unique<MooncakeStream>(std::move(documents));
}

const Registration<WorkloadFormat> kMooncake{
    {"mooncake", "JSONL: timestamp (ms), input_length, output_length, hash_ids of 512 tokens",
     is_mooncake, open_mooncake}};

}  // namespace
}  // namespace lockstep::cache_sim
