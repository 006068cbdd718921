#include "cache_sim/workloads/sglang_w1.hpp"

#include <fmt/format.h>

#include <array>
#include <utility>

#include "cache_sim/base/parameters.hpp"
#include "cache_sim/workloads/workload.hpp"
#include "reference/base/mix.hpp"

namespace lockstep::cache_sim {
namespace {

// --- The generator ------------------------------------------------------------------------------

/// The purpose of a hash. The numbers are part of the definition of the workload.
enum class Tag : std::uint64_t {
  system_size = 1,
  system_token = 2,
  request = 3,
  user_size = 4,
  user_token = 5,
  output_size = 6,
  output_token = 7,
};

constexpr std::uint32_t kSystemPrompts = 64;
constexpr std::size_t kActiveConversations = 128;
constexpr int kTurns = 6;  // turns of a conversation
// per cent of the requests, if there is a conversation to continue
constexpr int kContinuePercent = 60;
constexpr std::uint32_t kVocabulary = 31999;

constexpr std::int64_t kMostSlots = std::int64_t{1} << 30;  // the limit of a config field

/// h(tag, a, b) of one seed.
struct Hash {
  std::uint64_t seed;
  std::uint64_t operator()(Tag tag, std::uint64_t a, std::uint64_t b) const {
    return mix64(mix64(mix64(seed + static_cast<std::uint64_t>(tag)) ^ a) ^ b);
  }
  std::uint32_t within(std::uint32_t low, std::uint32_t count, Tag tag, std::uint64_t a) const {
    return low + static_cast<std::uint32_t>((*this)(tag, a, 0) % count);
  }
  void append(std::vector<std::uint32_t>& ids, std::uint32_t count, Tag tag,
              std::uint64_t a) const {
    for (std::uint32_t j = 0; j < count; ++j)
      ids.push_back(1 + static_cast<std::uint32_t>((*this)(tag, a, j) % kVocabulary));
  }
};

struct Conversation {
  std::int64_t number = 0;
  int turns = 0;
  std::int64_t previous = -1;  ///< its last request
  std::vector<std::uint32_t>
      context;  ///< the system prompt, then the user's and the output tokens of each turn
};

/// The place, among the active conversations, of the one that request `i` belongs to.
std::size_t choose_conversation(const Hash& hash, std::uint64_t i,
                                std::vector<Conversation>& active,
                                std::int64_t& conversation_count) {
  const std::uint64_t draw = hash(Tag::request, i, 0);
  if (!active.empty() && draw % 100 < kContinuePercent) return (draw >> 8) % active.size();
  const std::uint64_t k = (draw >> 8) % kSystemPrompts;
  Conversation fresh;
  fresh.number = conversation_count++;
  hash.append(fresh.context, hash.within(512, 1537, Tag::system_size, k), Tag::system_token, k);
  active.push_back(std::move(fresh));
  if (active.size() > kActiveConversations) active.erase(active.begin());
  return active.size() - 1;
}

}  // namespace

Result<SglangW1Options> SglangW1Options::parse(std::string_view parameters) {
  SglangW1Options options;
  auto seed = static_cast<std::int64_t>(options.seed);
  const std::array known{Parameter{"seed", 0, kMostInteger, &seed},
                         Parameter{"requests", 1, 1'000'000, &options.requests},
                         Parameter{"kv_tokens", 1, kMostSlots, &options.kv_tokens},
                         Parameter{"state_slots", 0, kMostSlots, &options.state_slots}};
  if (const Result<void> read = parse_parameters("sglang-w1", parameters, known); !read)
    return tl::unexpected(read.error());
  options.seed = static_cast<std::uint64_t>(seed);
  return options;
}

SglangW1 SglangW1::generate(const SglangW1Options& options) {
  const Hash hash{options.seed};
  SglangW1 workload{options, {}};
  workload.requests.reserve(static_cast<std::size_t>(options.requests));
  std::vector<Conversation> active;
  std::int64_t conversation_count = 0;
  for (std::int64_t i = 0; i < options.requests; ++i) {
    const auto a = static_cast<std::uint64_t>(i);
    const std::size_t at = choose_conversation(hash, a, active, conversation_count);
    Conversation& conversation = active[at];
    std::vector<std::uint32_t>& ids = conversation.context;
    hash.append(ids, hash.within(16, 241, Tag::user_size, a), Tag::user_token, a);
    const auto prompt_size = static_cast<std::uint32_t>(ids.size());
    hash.append(ids, hash.within(32, 225, Tag::output_size, a), Tag::output_token, a);
    workload.requests.push_back({.id = Name::intern(fmt::format("r{}", i)),
                                 .conversation = conversation.number,
                                 .previous = conversation.previous,
                                 .prompt_size = prompt_size,
                                 .tokens = Tokens::of_ids(ids)});
    conversation.previous = i;
    if (++conversation.turns == kTurns)
      active.erase(active.begin() + static_cast<std::ptrdiff_t>(at));
  }
  return workload;
}

std::uint64_t SglangW1::token_digest() const {
  Digest digest;
  for (const SglangW1Request& request : requests)
    for (std::uint32_t i = 0; i < request.tokens.size(); ++i) digest.add(request.tokens[i]);
  return digest.value;
}

// --- As a stream ---------------------------------------------------------------------------------

namespace {

/// The same requests as a stream, without the driver.
class SglangW1Stream final : public RequestStream {
 public:
  explicit SglangW1Stream(const SglangW1Options& options) : w1_(SglangW1::generate(options)) {}

  Result<bool> next(RequestSpec& spec) override {
    if (next_ == w1_.requests.size()) return false;
    const SglangW1Request& request = w1_.requests[next_++];
    spec = {.id = request.id,
            .session = Name::intern(fmt::format("c{}", request.conversation)),
            .tokens = request.tokens,
            .prompt_size = request.prompt_size,
            .at = 0};
    return true;
  }

 private:
  SglangW1 w1_;
  std::size_t next_ = 0;
};

OpenedStream open_sglang_w1(std::string_view parameters) {
  return SglangW1Options::parse(parameters)
      .map([](const SglangW1Options& options) -> std::unique_ptr<RequestStream> {
        return std::make_unique<SglangW1Stream>(options);
      });
}

const Registration<GeneratedWorkload> kSglangW1{
    {"sglang-w1", "2,000 multi-turn requests, made from a seed, with a driver of their own",
     "seed=,requests=,kv_tokens=,state_slots=", open_sglang_w1}};

}  // namespace

}  // namespace lockstep::cache_sim
