#include "cache_sim/workloads/vllm_w1.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>

#include "cache_sim/base/parameters.hpp"
#include "cache_sim/workloads/workload.hpp"
#include "reference/base/mix.hpp"

namespace lockstep::cache_sim {
namespace {

constexpr std::uint32_t kPrefixes = 64;

/// A stream of splitmix64.
class Stream {
 public:
  explicit Stream(std::uint64_t seed) : state_(seed) {}
  std::uint64_t next() {
    const std::uint64_t value = mix64(state_);
    state_ += 0x9E3779B97F4A7C15u;
    return value;
  }
  void append_tokens(std::vector<std::uint32_t>& ids, std::uint64_t count) {
    for (; count > 0; --count) ids.push_back(static_cast<std::uint32_t>(next() % kVocabulary));
  }

 private:
  static constexpr std::uint64_t kVocabulary = 152064;
  std::uint64_t state_;
};

}  // namespace

Result<VllmW1Options> VllmW1Options::parse(std::string_view parameters) {
  VllmW1Options options;
  // The one parameter that may be a word is taken out of the list; the others are numbers.
  std::string numbers;
  while (!parameters.empty()) {
    const std::string_view piece = parameters.substr(0, parameters.find(','));
    parameters.remove_prefix(std::min(piece.size() + 1, parameters.size()));
    if (piece == "retention=none")
      options.retention = "none";
    else
      numbers += (numbers.empty() ? "" : ",") + std::string(piece);
  }
  std::int64_t retention = -1;
  const std::array known{Parameter{"requests", 1, 1'000'000, &options.requests},
                         Parameter{"blocks", 2, 1 << 30, &options.blocks},
                         Parameter{"hash", 1, kVllmW1Block, &options.hash},
                         Parameter{"retention", 0, 1 << 30, &retention}};
  if (const Result<void> read = parse_parameters("vllm-w1", numbers, known); !read)
    return tl::unexpected(read.error());
  if (retention >= 0) options.retention = std::to_string(retention);
  return options;
}

VllmW1 VllmW1::generate(const VllmW1Options& options) {
  std::vector<std::vector<std::uint32_t>> prefixes(kPrefixes);
  Stream sizes(0x5EED0001);
  for (std::uint32_t i = 0; i < kPrefixes; ++i)
    Stream(0xA000 + i).append_tokens(prefixes[i], 512 + 16 * (sizes.next() % 97));

  VllmW1 workload{options, {}};
  workload.requests.reserve(static_cast<std::size_t>(options.requests));
  Stream draws(0x5EED0002);
  for (std::uint64_t i = 0; i < static_cast<std::uint64_t>(options.requests); ++i) {
    const auto prefix = static_cast<std::uint32_t>(draws.next() % kPrefixes);
    std::vector<std::uint32_t> ids = prefixes[prefix];
    Stream(0xB0000000 + i).append_tokens(ids, 16 + draws.next() % 240);
    const auto prompt_size = static_cast<std::uint32_t>(ids.size());
    Stream(0xC0000000 + i).append_tokens(ids, kVllmW1Outputs);
    workload.requests.push_back({.id = Name::intern(fmt::format("{}", i)),
                                 .prefix = prefix,
                                 .prompt_size = prompt_size,
                                 .tokens = Tokens::of_ids(std::move(ids))});
  }
  return workload;
}

// --- As a stream ---------------------------------------------------------------------------------

namespace {

/// The same requests as a stream, without the driver.
class VllmW1Stream final : public RequestStream {
 public:
  explicit VllmW1Stream(const VllmW1Options& options) : w1_(VllmW1::generate(options)) {}

  Result<bool> next(RequestSpec& spec) override {
    if (next_ == w1_.requests.size()) return false;
    const VllmW1Request& request = w1_.requests[next_++];
    spec = {
        .id = request.id, .tokens = request.tokens, .prompt_size = request.prompt_size, .at = 0};
    return true;
  }

 private:
  VllmW1 w1_;
  std::size_t next_ = 0;
};

OpenedStream open_vllm_w1(std::string_view parameters) {
  return VllmW1Options::parse(parameters)
      .map([](const VllmW1Options& options) -> std::unique_ptr<RequestStream> {
        return std::make_unique<VllmW1Stream>(options);
      });
}

const Registration<GeneratedWorkload> kVllmW1{
    {"vllm-w1",
     "2,000 requests over 64 shared prefixes, made from seeds, with a driver of their own",
     "requests=,blocks=,retention=,hash=", open_vllm_w1}};

}  // namespace

}  // namespace lockstep::cache_sim
