#include "cache_sim/numbers/torch/tensor_batch.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

#include "cache_sim/numbers/compared.hpp"
#include "cache_sim/numbers/torch/judged_calls.hpp"

namespace lockstep::cache_sim {

using at::Tensor;

namespace {

constexpr std::int64_t kAllJudged = 4, kOneJudgedIn = 16;  // forwards
constexpr std::int64_t kMostJudged = 1 << 14;  // numbers of activations: definitions are slow
constexpr std::uint32_t kQuietNan = 0x7FC00000u;
constexpr std::uint32_t kPoisonOfPairs = 0x7FC07FC0u;  // two NaN of bfloat16, or one of float32

Tensor bits_of(const Tensor& x) {
  return x.view(x.element_size() == 2 ? at::kShort : at::kInt);
}

}  // namespace

bool same_bits(const Tensor& a, const Tensor& b) {
  return at::equal(bits_of(a.contiguous()), bits_of(b.contiguous()));
}

void poison(const Tensor& numbers, std::uint32_t number) {
  if (numbers.scalar_type() == at::kFloat)
    bits_of(numbers).fill_(static_cast<std::int64_t>(kQuietNan | (number + 1)));
  else
    numbers.fill_(std::numeric_limits<double>::quiet_NaN());
}

void poison_each(const Tensor& pool) {
  if (pool.scalar_type() != at::kFloat) return poison(pool, 0);
  const Tensor numbers =
      at::arange(1, pool.size(0) + 1, at::TensorOptions(at::kInt).device(pool.device()));
  bits_of(pool).flatten(1).copy_(
      numbers.bitwise_or(static_cast<std::int64_t>(kQuietNan)).unsqueeze(1));
}

void poison_blocks(const Tensor& blocks, at::ScalarType activations, std::uint32_t first) {
  if (activations != at::kFloat) {
    blocks.fill_(static_cast<std::int64_t>(kPoisonOfPairs));
    return;
  }
  blocks.copy_(at::arange(first + 1, first + 1 + blocks.size(0), blocks.options())
                   .bitwise_or(static_cast<std::int64_t>(kQuietNan))
                   .unsqueeze(1));
}

std::string origin(const Tensor& numbers, std::string_view kind) {
  const Tensor host = numbers.to(at::kCPU).contiguous();
  if (host.scalar_type() != at::kFloat)
    return host.isnan().any().item<bool>() ? ", which holds what nobody wrote" : "";
  const float* const first = host.data_ptr<float>();
  for (std::int64_t i = 0; i < host.numel(); ++i) {
    const auto bits = std::bit_cast<std::uint32_t>(first[i]);
    if (bits == kPoisonOfPairs) return ", which holds what nobody wrote";
    if ((bits & kQuietNan) == kQuietNan && bits > kQuietNan && bits < 0x80000000u)
      return ", which holds what " + std::string(kind) + " " +
             std::to_string(bits - kQuietNan - 1) + " had before anybody wrote it";
  }
  return "";
}

std::vector<double> logits_of(std::span<const float> all, std::int64_t token,
                              std::int64_t vocabulary) {
  const auto own = all.subspan(static_cast<std::size_t>(token * vocabulary),
                               static_cast<std::size_t>(vocabulary));
  return {own.begin(), own.end()};
}

std::optional<std::string> moved_logits(const TensorRow& row, std::span<const float> logits,
                                        const RowTruth& truth, std::int64_t vocabulary) {
  if (std::memcmp(logits.data(), truth.logits.data(), logits.size_bytes()) == 0) return {};
  for (std::int64_t i = 0; i < row.sampled(); ++i) {
    const std::int64_t tokens = row.begin + row.size() - row.padding - row.sampled() + i + 1;
    if (auto moved =
            moved_logits(static_cast<std::uint32_t>(tokens), logits_of(logits, i, vocabulary),
                         logits_of(truth.logits, i, vocabulary)))
      return moved;
  }
  return "logits have other bits";
}

TensorResults TensorBatches::run(std::span<const TensorRow* const> rows, TensorMemory& memory,
                                 Findings& findings) {
  std::int64_t tokens = 0;
  for (const TensorRow* const row : rows) tokens += row->size();
  computed_ += tokens;
  // Of each run the first forwards and then one in 16, so that a trace shows the same again.
  const std::int64_t number = forwards_++;
  const bool judges = (number < kAllJudged || number % kOneJudgedIn == 0) &&
                      tokens * model_.config().hidden <= kMostJudged;
  if (!judges)
    return TensorModel::fits_bucket(rows) ? decode(rows, memory, findings)
                                          : model_.forward(rows, memory.pools, true);
  const JudgedCalls judged;
  TensorResults results = model_.forward(rows, memory.pools, true);
  for (const std::string& wrong : judged.wrong())
    findings.push_back({FindingKind::number_differs, "operator " + wrong,
                        "within its yardstick of its definition in double", "beyond it"});
  return results;
}

/// Decodes in a bucket, whose padding has no slot: slot 0 stays as it is.
TensorResults TensorBatches::decode(std::span<const TensorRow* const> rows, TensorMemory& memory,
                                    Findings& findings) const {
  std::vector<Tensor> before;
  if (!std::has_single_bit(rows.size()))
    for (const Tensor& pool : memory.pools) before.push_back(pool.select(0, 0).clone());
  TensorResults results = model_.decode(rows, memory);
  for (std::size_t i = 0; i < before.size(); ++i)
    if (!same_bits(memory.pools[i].select(0, 0), before[i]))
      findings.push_back({FindingKind::number_differs,
                          "padding of a bucket writes " + std::string(model_.parts()[i].name()) +
                              " slot 0 of unit " + std::to_string(model_.parts()[i].unit),
                          "no slot is written by rows that are nobody's", "slot 0 has other bits"});
  return results;
}

}  // namespace lockstep::cache_sim
