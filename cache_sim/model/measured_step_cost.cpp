#include "cache_sim/model/measured_step_cost.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "cache_sim/base/json_documents.hpp"
#include "reference/base/require.hpp"

namespace lockstep::cache_sim {

/// A kernel of a model's layers. `cases` are texts of the field `case`, with {} for the numbers
/// that vary.
struct LayerKernel {
  enum class Work {
    decode_rows,       ///< x: rows
    prefill_tokens,    ///< x: tokens
    decode_attention,  ///< x: rows, y: their length
    prompt_attention,  ///< x: pairs of T tokens, and of those behind a prefix
  };
  std::string_view model;
  std::string_view operation;
  std::array<std::string_view, 2> cases;
  Work work;
};

namespace {

using Work = LayerKernel::Work;
using Kernel = MeasuredLayers::Kernel;

constexpr std::array kLayerKernels{
    LayerKernel{"nemotron-h",
                "selective_state_update",
                {"B={} H=128 P=64 N=128 G=8 state fp32"},
                Work::decode_rows},
    LayerKernel{"nemotron-h", "ssd_prefill", {"T={} H=128 P=64 N=128 G=8"}, Work::prefill_tokens},
    LayerKernel{"qwen3-next",
                "gated_delta_rule_update",
                {"B={} H=16 HV=32 K=V=128 state fp32"},
                Work::decode_rows},
    LayerKernel{"qwen3-next",
                "gated_delta_rule_prefill",
                {"T={} H=16 HV=32 K=V=128"},
                Work::prefill_tokens},
    LayerKernel{"qwen3-next", "causal_conv1d_update", {"B={} D=8192 W=4 bf16"}, Work::decode_rows},
    LayerKernel{"qwen3-next", "causal_conv1d", {"T={} D=8192 W=4 bf16"}, Work::prefill_tokens},
    LayerKernel{"deepseek-v3", "mla_decode", {"H=128 B={} L={}"}, Work::decode_attention},
    LayerKernel{"deepseek-v3",
                "mla_prefill",
                {"H=128 T={}", "H=128 T={} over {} of a prefix"},
                Work::prompt_attention},
};

bool is_attention(Work work) {
  return work == Work::decode_attention || work == Work::prompt_attention;
}

std::int64_t pairs(std::int64_t tokens, std::int64_t prefix) {
  return tokens * prefix + tokens * (tokens + 1) / 2;
}

// --- Recorded cases ------------------------------------------------------------------------------

/// The numbers at the {} of a form, if the text has that form.
std::optional<std::vector<std::int64_t>> numbers_in(std::string_view text, std::string_view form) {
  std::vector<std::int64_t> numbers;
  for (;;) {
    const std::size_t hole = std::min(form.find("{}"), form.size());
    if (text.substr(0, hole) != form.substr(0, hole)) return std::nullopt;
    text.remove_prefix(hole);
    form.remove_prefix(hole);
    if (form.empty()) return text.empty() ? std::optional(numbers) : std::nullopt;
    const std::string_view digits = text.substr(0, text.find_first_not_of("0123456789"));
    const Result<std::int64_t> number = parse_integer(digits, 1, std::int64_t{1} << 24);
    if (!number) return std::nullopt;
    numbers.push_back(*number);
    text.remove_prefix(digits.size());
    form.remove_prefix(2);
  }
}

/// A positive number of the field, in units of 1 / 1000, not above a million.
Result<std::int64_t> thousandths(const Record& record, std::string_view field) {
  Result<std::int64_t> value = record.time(field, 1000);
  if (value && (*value < 1 || *value > 1'000'000'000))
    return record.error(field, fmt::format("{} is not between 0.001 and a million",
                                           static_cast<double>(*value) / 1000));
  return value;
}

/// The word stands in the name of a card: H200 in `NVIDIA H200`.
bool has_word(std::string_view name, std::string_view word) {
  return fmt::format(" {} ", name).find(fmt::format(" {} ", word)) != std::string::npos;
}

/// Adds a case of one of the kernel's forms to `cases`, and its bounds to `kernel`.
Result<void> add_case(const Record& row, Kernel& kernel, std::vector<RecordedTimes::Case>& cases) {
  const Result<std::string> text = row.text("case");
  if (!text) return tl::unexpected(text.error());
  for (const std::string_view form : kernel.what->cases) {
    const auto numbers = numbers_in(*text, form);
    if (form.empty() || !numbers) continue;
    const std::int64_t first = numbers->front();
    const std::int64_t second = numbers->size() > 1 ? numbers->back() : 0;
    const Result<Nanoseconds> time = thousandths(row, "time_us");
    const Result<std::int64_t> bytes = row.integer("bytes", 1, std::int64_t{1} << 48);
    if (!time || !bytes) return tl::unexpected(!time ? time.error() : bytes.error());
    const bool has_pairs = kernel.what->work == Work::prompt_attention;
    cases.push_back({has_pairs ? pairs(first, second) : first, has_pairs ? 0 : second, *time});
    kernel.least_tokens = cases.size() == 1 ? first : std::min(kernel.least_tokens, first);
    kernel.most_tokens = std::max(kernel.most_tokens, first);
    if (first > kernel.largest_work) {
      kernel.largest_work = first;
      kernel.largest_bytes = *bytes;
    }
  }
  return {};
}

/// The entry of a kernel's file that counts for a card.
struct Entry {
  Record record;
  std::string gpu;  ///< of an entry that is not used: of all entries
  bool is_used;
};

/// The file's entry of the card; its first one, which is not used, if none is of that card.
Result<Entry> entry_of(const Record& file, std::string_view card) {
  const Result<std::vector<Record>> chips = file.objects("chips");
  if (!chips) return tl::unexpected(chips.error());
  if (chips->empty()) return file.error("chips", "the entry of a card is missing");
  std::optional<Entry> used;
  std::vector<std::string> gpus;
  for (const Record& chip : *chips) {
    Result<std::string> gpu = chip.text("gpu");
    if (!gpu) return tl::unexpected(gpu.error());
    gpus.push_back(*gpu);
    if (!has_word(*gpu, card)) continue;
    if (used)
      return chip.error("gpu", fmt::format("`{}` beside an entry of `{}`: {} stands for two cards",
                                           *gpu, used->gpu, card));
    used = Entry{chip, std::move(*gpu), true};
  }
  if (used) return std::move(*used);
  return Entry{chips->front(), fmt::format("{}", fmt::join(gpus, " and ")), false};
}

/// Reads a kernel's file into `layers`.
Result<void> read_kernel(const LayerKernel& what, std::string_view card, const std::string& folder,
                         MeasuredLayers& layers) {
  const std::string path = fmt::format("{}/{}.json", folder, what.operation);
  const auto documents = JsonDocuments::open(path);
  if (!documents) return tl::unexpected(documents.error());
  const Result<const nlohmann::json*> document = (*documents)->next();
  if (!document) return tl::unexpected(document.error());
  if (*document == nullptr) return fail(path + ": the file is empty");
  const Result<Entry> entry = entry_of(Record(**document, (*documents)->place()), card);
  if (!entry) return tl::unexpected(entry.error());
  const auto& [chip, gpu, is_used] = *entry;
  const Result<std::string> commit = chip.text("commit"), date = chip.text("date");
  const Result<std::int64_t> rate = thousandths(chip, "read_gbps");
  const Result<std::int64_t> products = thousandths(chip, "matmul_tflops");
  const Result<std::vector<Record>> rows = chip.objects("speed");
  for (const auto* const text : {&commit, &date})
    if (!*text) return tl::unexpected(text->error());
  for (const auto* const number : {&rate, &products})
    if (!*number) return tl::unexpected(number->error());
  if (!rows) return tl::unexpected(rows.error());

  Kernel kernel{&what, {}, 0, 0, 0, 0};
  std::vector<RecordedTimes::Case> cases;
  for (const Record& row : *rows)
    if (Result<void> added = add_case(row, kernel, cases); !added) return added;
  if (cases.empty())
    return chip.error("speed", fmt::format("no `case` has the form `{}`", what.cases[0]));
  if (is_used && !layers.gpu.empty() && layers.gpu != gpu)
    return chip.error("gpu", fmt::format("`{}`, where an earlier file has `{}`: {} stands for two "
                                         "cards",
                                         gpu, layers.gpu, card));
  if (is_used && layers.gpu.empty()) {
    layers.gpu = gpu;
    layers.bytes_per_microsecond = *rate;
    layers.flops_per_nanosecond = *products;
  }
  if (is_used) {
    std::set<std::int64_t> x, y;
    for (const RecordedTimes::Case& one : cases) x.insert(one.x), y.insert(one.y);
    if (x.size() * y.size() != cases.size())
      return chip.error("speed",
                        fmt::format("the cases of the form `{}` are no grid", what.cases[0]));
    kernel.times = RecordedTimes(std::move(cases));
  }
  layers.evidence.push_back({std::string(what.operation), path, gpu, *commit, *date, is_used});
  layers.kernels.push_back(std::move(kernel));
  return {};
}

/// time of `value` on the line through two cases. IEEE 754 decides its bits, and it does not fall
/// where the times grow.
Nanoseconds between(std::int64_t a, std::int64_t b, Nanoseconds time_a, Nanoseconds time_b,
                    std::int64_t value) {
  if (a == b) return time_a;
  const double part = static_cast<double>(value - a) / static_cast<double>(b - a);
  return time_a + std::llround(part * static_cast<double>(time_b - time_a));
}

/// The places in a sorted list between which a value within its ends lies.
std::pair<std::size_t, std::size_t> around(const std::vector<std::int64_t>& list,
                                           std::int64_t value) {
  const auto high = static_cast<std::size_t>(std::ranges::lower_bound(list, value) - list.begin());
  return {list[high] == value ? high : high - 1, high};
}

}  // namespace

RecordedTimes::RecordedTimes(std::vector<Case> cases) {
  std::ranges::sort(cases, [](const Case& a, const Case& b) {
    return std::pair(a.x, a.y) < std::pair(b.x, b.y);
  });
  for (const Case& one : cases) {
    if (x_.empty() || x_.back() != one.x) x_.push_back(one.x);
    if (one.x == cases.front().x) y_.push_back(one.y);
    times_.push_back(one.time);
  }
  require(x_.size() * y_.size() == times_.size(), "the cases form a grid");
}

Nanoseconds RecordedTimes::at(std::int64_t x, std::int64_t y) const {
  const auto [x0, x1] = around(x_, x);
  const auto [y0, y1] = around(y_, y);
  const auto along_x = [&, x0 = x0, x1 = x1](std::size_t row) {
    return between(x_[x0], x_[x1], times_[x0 * y_.size() + row], times_[x1 * y_.size() + row], x);
  };
  return between(y_[y0], y_[y1], along_x(y0), along_x(y1), y);
}

RecordedTimes::Time RecordedTimes::of(const Work& work, Nanoseconds limit) const {
  if (times_.empty() || work.x < x_.front() || work.y < y_.front()) return {limit, false};
  const std::int64_t x = std::min(work.x, x_.back()), y = std::min(work.y, y_.back());
  const Nanoseconds time = at(x, y);
  if (work.is_covered && x == work.x && y == work.y) return {time, true};
  return {std::max(time, limit), false};
}

Result<MeasuredLayers> MeasuredLayers::read(const Model& model, std::string_view card,
                                            const std::string& folder) {
  MeasuredLayers layers;
  for (const LayerKernel& kernel : kLayerKernels)
    if (kernel.model == model.name)
      if (const Result<void> read = read_kernel(kernel, card, folder, layers); !read)
        return tl::unexpected(read.error());
  if (layers.kernels.empty())
    return fail(fmt::format("no kernel was measured at the sizes of model {}", model.name));
  if (layers.gpu.empty()) {
    std::vector<std::string> files;
    for (const KernelEvidence& one : layers.evidence)
      files.push_back(fmt::format("{}: field gpu: `{}`", one.file, one.gpu));
    return fail(fmt::format("no kernel of model {} was measured on {}: {}", model.name, card,
                            fmt::join(files, "; ")));
  }
  return layers;
}

// --- The cost of a step --------------------------------------------------------------------------

namespace {

/// The work of a step for a kernel; x is 0 where it has none.
RecordedTimes::Work work_of(const Kernel& kernel, const StepWork& step) {
  const std::int64_t rows = step.decode_tokens, tokens = step.prefill_tokens;
  switch (kernel.what->work) {
    case Work::decode_rows: return {rows};
    case Work::prefill_tokens: return {tokens};
    case Work::decode_attention:
      if (tokens != 0 || rows == 0) return {};
      return {rows, step.seen_tokens / rows};
    case Work::prompt_attention:
      if (rows != 0 || tokens == 0) return {};
      // Tokens of one row see each other; fewer pairs show that there are several rows.
      return {step.seen_tokens, 0,
              tokens >= kernel.least_tokens && tokens <= kernel.most_tokens &&
                  step.seen_tokens >= pairs(tokens, 0)};
  }
  return {};
}

}  // namespace

MeasuredStepCost::MeasuredStepCost(const Model& model, std::shared_ptr<const MeasuredLayers> layers,
                                   std::vector<CostPart>& parts)
    : model_(model), layers_(std::move(layers)), parts_(&parts) {
  parts.clear();
  for (const Kernel& kernel : layers_->kernels)
    parts.push_back({.name = std::string(kernel.what->operation)});
  for (const char* const name : {"attention", "weights", "launch"}) parts.push_back({.name = name});
}

Nanoseconds MeasuredStepCost::reading(std::int64_t bytes) const {
  return scaled(bytes, 1000, layers_->bytes_per_microsecond);
}

Nanoseconds MeasuredStepCost::attention_limit(const StepWork& work) const {
  return std::max(scaled(work.seen_tokens, model_.flops_per_pair, layers_->flops_per_nanosecond),
                  reading(work.context_tokens * model_.token_bytes));
}

Nanoseconds MeasuredStepCost::of(const StepWork& work) const {
  Nanoseconds total = 0;
  const auto add = [&](std::size_t part, Nanoseconds time, bool is_measured) {
    (is_measured ? (*parts_)[part].measured : (*parts_)[part].modelled) += time;
    total += time;
  };
  bool has_attention = false;
  const std::size_t kernels = layers_->kernels.size();
  for (std::size_t i = 0; i < kernels; ++i) {
    const Kernel& kernel = layers_->kernels[i];
    const RecordedTimes::Work own = work_of(kernel, work);
    if (own.x == 0) continue;
    const bool attends = is_attention(kernel.what->work);
    const std::int64_t layers = attends ? model_.attention_layers : model_.state_layers;
    const Nanoseconds limit =
        attends ? attention_limit(work) / layers
                : reading(scaled(own.x, kernel.largest_bytes, kernel.largest_work));
    const RecordedTimes::Time time = kernel.times.of(own, limit);
    add(i, layers * time.time, time.is_measured);
    has_attention |= attends;
  }
  if (!has_attention) add(kernels, attention_limit(work), false);
  add(kernels + 1,
      std::max(scaled(work.prefill_tokens + work.decode_tokens, model_.flops_per_token,
                      layers_->flops_per_nanosecond),
               reading(model_.weight_bytes)),
      false);
  add(kernels + 2, ModelStepCost::kLaunch, false);
  return total;
}

}  // namespace lockstep::cache_sim
