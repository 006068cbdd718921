// The cases of state_copy and state_scatter_accepted. They copy states, so every bit must be right.
#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "kernels/judge/operation.hpp"
#include "reference/base/counted.hpp"
#include "reference/base/mix.hpp"
#include "reference/recurrent/speculative_commit.hpp"

namespace lockstep::judging::of_state_copy {
namespace {

/// Makes all zeros -0: a copy that computes with the elements turns them into 0.
void sign_zeros(Tensor& tensor) {
  for (double& x : tensor.values)
    if (x == 0) x = -0.0;
}

// --- state_copy ----------------------------------------------------------------------------------

struct Moves {
  std::string name;
  Extents pool;  ///< [layers, slots, state...]
  std::vector<std::int32_t> source{}, target{};
  bool spread = false;  ///< holes between slots
  bool timed = false;
};

Case make_copy(const Moves& spec, const CaseOptions& options) {
  Moves moves = spec;
  if (moves.timed) {  // moves the first half of the slots to the second half
    moves.pool[1] = 2 * options.batch;
    moves.source.resize(static_cast<std::size_t>(options.batch));
    moves.target.resize(moves.source.size());
    std::iota(moves.source.begin(), moves.source.end(), 0);
    std::iota(moves.target.begin(), moves.target.end(), static_cast<std::int32_t>(options.batch));
  }
  Draw draw(mix64(options.seed ^ moves.name.size()));
  Case c{.name = moves.name, .timed = moves.timed};
  std::vector<std::string> axes{"layer", "slot", "head", "row", "column"};
  axes.resize(moves.pool.size());
  Tensor state = draw("state", options.states, moves.pool, axes);
  state.role = Role::state;
  sign_zeros(state);
  if (moves.spread) spread(state, 1, 64);
  c.tensors.push_back(std::move(state));
  const auto count = static_cast<std::int64_t>(moves.source.size());
  c.tensors.push_back(indices("source", {count}, moves.source));
  c.tensors.push_back(indices("target", {count}, moves.target));
  const Tensor& pool = c.tensors[0];
  c.bytes = 2 * pool.bytes() / std::max<std::int64_t>(moves.pool[1], 1) * count;
  c.about = fmt::format("{}, {}, {}", counted(moves.pool[0], "layer"),
                        counted(moves.pool[1], "slot"), counted(count, "move"));
  return c;
}

const Moves kServed{.name = "serving", .pool = {4, 0, 32, 128, 128}, .timed = true};

const std::vector<Moves> kMoves{
    {.name = "one", .pool = {1, 4, 2, 8, 16}, .source = {2}, .target = {1}},
    {.name = "layers", .pool = {5, 7, 2, 9, 13}, .source = {0, 6, 3}, .target = {1, 2, 5}},
    {.name = "fork", .pool = {2, 9, 4, 16, 8}, .source = {4, 4, 4, 4}, .target = {0, 8, 1, 3}},
    {.name = "swap", .pool = {3, 6, 2, 8, 32}, .source = {1, 4, 0}, .target = {4, 1, 2}},
    {.name = "chain", .pool = {3, 8, 64, 1, 65}, .source = {0, 1, 2, 3}, .target = {1, 2, 3, 4}},
    {.name = "cycle",
     .pool = {2, 8, 8, 16, 8},
     .source = {0, 1, 2, 3, 4, 5, 6, 7},
     .target = {7, 0, 1, 2, 3, 4, 5, 6}},
    {.name = "onto-itself", .pool = {2, 4, 1, 1, 3}, .source = {2, 0}, .target = {2, 3}},
    {.name = "nothing", .pool = {2, 4, 1, 4, 4}},
    {.name = "holes", .pool = {3, 6, 2, 8, 16}, .source = {5, 2}, .target = {0, 1}, .spread = true},
    {.name = "cycle-holes",
     .pool = {2, 5, 2, 8, 16},
     .source = {0, 1, 2, 3},
     .target = {3, 0, 1, 2},
     .spread = true},
    kServed,
};

/// More moves than fit into the second dimension of a grid: the first half to the second one.
std::vector<Moves> wide_moves() {
  Moves moves{.name = "moves-65537", .pool = {1, 2 * kWideRows, 1, 1, 4}};
  for (std::int64_t i = 0; i < kWideRows; ++i) {
    moves.source.push_back(static_cast<std::int32_t>(i));
    moves.target.push_back(static_cast<std::int32_t>(2 * kWideRows - 1 - i));
  }
  return {moves};
}

const std::vector<Mistake> kCopyMistakes{
    {"in-order", "with each move made after the one before it, so that sources were overwritten"},
    {"backwards", "with source and target swapped"},
    {"first-layer", "with only the first layer moved"},
    {"no-move", "with nothing moved"},
};

std::vector<double> moved(const Case& c, std::string_view mistake) {
  const Tensor& state = c.tensor("state");
  std::vector<double> values = state.values;
  const std::vector<double> before = values;
  const std::int64_t slots = state.extents[1];
  const std::int64_t size = state.count() / std::max<std::int64_t>(1, state.extents[0] * slots);
  const bool swapped = mistake == "backwards";
  const std::vector<double>& source = c.tensor(swapped ? "target" : "source").values;
  const std::vector<double>& target = c.tensor(swapped ? "source" : "target").values;
  if (mistake == "no-move") return values;
  for (std::int64_t layer = 0; layer < state.extents[0]; ++layer) {
    if (mistake == "first-layer" && layer > 0) break;
    for (std::size_t i = 0; i < source.size(); ++i) {
      const auto from = layer * slots + static_cast<std::int64_t>(source[i]);
      const auto to = layer * slots + static_cast<std::int64_t>(target[i]);
      const std::vector<double>& read = mistake == "in-order" ? values : before;
      std::copy_n(read.begin() + from * size, size, values.begin() + to * size);
    }
  }
  return values;
}

Answer copy_truth(const Case& c, std::string_view mistake) {
  if (!mistake.empty()) return {{"state", moved(c, mistake)}};
  Array<double, 5> pool = array_of<double, 5>(c, "state");
  const auto source = array_of<std::int32_t, 1>(c, "source");
  const auto target = array_of<std::int32_t, 1>(c, "target");
  reference::copy_states(pool, source.view(), target.view());
  return {{"state", as_values(pool)}};
}

const JudgedKernel kCopy{.name = "state_copy",
                         .summary = "copies between slots, bit by bit: 11 cases, 4 known mistakes",
                         .positional = {"state", "source", "target"},
                         .returns = false,
                         .exact = true,
                         .default_types = "float32/float32",
                         .plans =
                             [] {
                               return with_large(planned<Moves>({kMoves}, make_copy),
                                                 planned<Moves>({wide_moves()}, make_copy), "swap");
                             },
                         .row_elements = std::int64_t{4} * 2 * 32 * 128 * 128,
                         .truth = copy_truth,
                         .yardstick = copy_truth,
                         .mistakes = kCopyMistakes};

// --- state_scatter_accepted ----------------------------------------------------------------------

struct Commits {
  std::string name;
  std::int64_t T;
  std::vector<std::int32_t> slots{}, accepted{};
  bool spread = false;  ///< holes between slots
  bool timed = false;
};

Case make_scatter(const Commits& spec, const CaseOptions& options) {
  Commits commits = spec;
  for (std::int64_t row = 0; spec.timed && row < options.batch; ++row) {
    commits.slots.push_back(static_cast<std::int32_t>(options.batch - row));
    commits.accepted.push_back(static_cast<std::int32_t>(1 + row % 4));
  }
  const auto B = static_cast<std::int64_t>(commits.slots.size());
  const Extents inner = commits.timed ? Extents{32, 128, 128} : Extents{3, 5, 16};
  std::int64_t slots = 3;
  for (const std::int32_t slot : commits.slots) slots = std::max<std::int64_t>(slots, slot + 2);
  Draw draw(mix64(options.seed ^ commits.name.size()));
  Case c{.name = commits.name, .timed = commits.timed};
  c.tensors.push_back(draw("state", options.states, {slots, inner[0], inner[1], inner[2]},
                           {"slot", "head", "row", "column"}));
  c.tensors[0].role = Role::state;
  sign_zeros(c.tensors[0]);
  if (commits.spread) spread(c.tensors[0], 0, 64);
  c.tensors.push_back(draw("intermediate", options.states,
                           {B, commits.T, inner[0], inner[1], inner[2]},
                           {"row", "token", "head", "row", "column"}));
  sign_zeros(c.tensors[1]);
  c.tensors.push_back(indices("slots", {B}, commits.slots));
  c.tensors.push_back(indices("num_accepted_tokens", {B}, commits.accepted));
  c.slots.assign(static_cast<std::size_t>(slots), {});
  std::int64_t count = 0;
  for (std::size_t b = 0; b < commits.slots.size(); ++b) {
    if (commits.slots[b] < 0 || commits.accepted[b] <= 0) continue;
    ++count;
    CaseSlot& slot = c.slots[static_cast<std::size_t>(commits.slots[b])];
    slot.use = SlotUse::written;
    slot.token = {.row = static_cast<std::int64_t>(b), .accepted = commits.accepted[b]};
  }
  c.bytes = 2 * c.tensors[0].bytes() / slots * count;
  c.about = fmt::format("{}, {} each, {}", counted(B, "row"), counted(commits.T, "token"),
                        counted(slots, "slot"));
  return c;
}

const std::vector<Commits> kCommits{
    {.name = "every-count", .T = 4, .slots = {3, 1, 5, 2, 6}, .accepted = {1, 2, 3, 4, 0}},
    {.name = "padding", .T = 3, .slots = {4, -1, 2, -7}, .accepted = {3, 2, 1, 3}},
    {.name = "none-accepted", .T = 2, .slots = {1, 2, 3}, .accepted = {0, -1, 0}},
    {.name = "one-token", .T = 1, .slots = {2, 1}, .accepted = {1, 1}},
    {.name = "one-row", .T = 4, .slots = {1}, .accepted = {3}},
    {.name = "holes", .T = 3, .slots = {3, 1, -1}, .accepted = {2, 3, 1}, .spread = true},
    {.name = "serving", .T = 4, .timed = true},
};

std::vector<Commits> wide_commits() {
  Commits commits{.name = "rows-65537", .T = 1};
  for (std::int64_t row = 0; row < kWideRows; ++row)
    commits.slots.push_back(static_cast<std::int32_t>(kWideRows - row));
  commits.accepted.assign(commits.slots.size(), 1);
  return {commits};
}

const std::vector<Mistake> kScatterMistakes{
    {"count-as-index", "with num_accepted_tokens taken for the index instead of the count"},
    {"last-token", "with the last token's state committed, whatever was accepted"},
    {"first-token", "with the first token's state committed, whatever was accepted"},
    {"all-left-out", "with rows left out whose tokens were all accepted"},
    {"row-slots", "with row i on slot i, without slots"},
};

Answer scatter_truth(const Case& c, std::string_view mistake) {
  Array<double, 4> state = array_of<double, 4>(c, "state");
  const auto intermediate = array_of<double, 5>(c, "intermediate");
  auto slots = array_of<std::int32_t, 1>(c, "slots");
  auto accepted = array_of<std::int32_t, 1>(c, "num_accepted_tokens");
  const auto T = static_cast<std::int32_t>(intermediate.extent(1));
  for (std::int64_t b = 0; b < accepted.extent(0); ++b) {
    std::int32_t& n = accepted(b);
    if (mistake == "row-slots") slots(b) = static_cast<std::int32_t>(b);
    if (n <= 0) continue;
    if (mistake == "count-as-index") n = std::min(n + 1, T);
    if (mistake == "last-token") n = T;
    if (mistake == "first-token") n = 1;
    if (mistake == "all-left-out" && n == T) n = 0;
  }
  reference::scatter_accepted(state.view(), intermediate.view(), slots.view(), accepted.view());
  return {{"state", as_values(state)}};
}

const JudgedKernel kScatter{
    .name = "state_scatter_accepted",
    .summary = "commits of accepted states, bit by bit: 7 cases, 5 known mistakes",
    .positional = {"state", "intermediate", "slots", "num_accepted_tokens"},
    .returns = false,
    .exact = true,
    .default_types = "float32/float32",
    .plans =
        [] {
          return with_large(planned<Commits>({kCommits}, make_scatter),
                            planned<Commits>({wide_commits()}, make_scatter), "every-count");
        },
    .row_elements = std::int64_t{5} * 32 * 128 * 128,
    .truth = scatter_truth,
    .yardstick = scatter_truth,
    .mistakes = kScatterMistakes};

const Registration<JudgedOperation> kRegisteredCopy{judged<kCopy>()};
const Registration<JudgedOperation> kRegisteredScatter{judged<kScatter>()};

}  // namespace
}  // namespace lockstep::judging::of_state_copy
