// The operators torch.ops.lockstep.* on the CPU, called as PyTorch calls them: they are their
// references bit by bit, write what their schemas say and nothing else, and refuse what they cannot
// take by the argument's name. The GPU's side and torch.compile:
// properties/kernels/torch/torch_ops_check.py.
#include <fstream>
#include <set>
#include <sstream>

#include "properties/kernels/torch/torch_operator.hpp"
#include "properties/support/laws.hpp"
#include "properties/support/torch_bridge.hpp"
#include "reference/recurrent/causal_conv1d.hpp"
#include "reference/recurrent/gated_delta_rule.hpp"
#include "reference/recurrent/mamba2.hpp"
#include "reference/recurrent/scaled_state.hpp"
#include "reference/recurrent/speculative_commit.hpp"

namespace lockstep::of_torch_ops {
namespace {

using namespace testing_support;
using at::Tensor;

using Ints = Array<std::int32_t, 1>;
using Table = Array<std::int32_t, 2>;

Table table_of(const std::vector<Sizes>& rows) {
  Table table(Shape<2>{static_cast<std::int64_t>(rows.size()),
                       static_cast<std::int64_t>(rows.at(0).size())},
              0);
  for (std::size_t i = 0; i < rows.size(); ++i)
    for (std::size_t j = 0; j < rows[i].size(); ++j)
      table(static_cast<std::int64_t>(i), static_cast<std::int64_t>(j)) =
          static_cast<std::int32_t>(rows[i][j]);
  return table;
}

// --- What is asked ------------------------------------------------------------------------------

constexpr std::int64_t kTokens = 7, kSlots = 9;

/// Which rows there are among kTokens tokens, and in which of kSlots slots their states lie.
struct Question {
  std::string name;
  std::optional<Ints> starts{}, indices{}, out_indices{};
  std::optional<Table> table{}, out_table{};
  std::optional<Ints> accepted{}, parents{};
  bool snapshots = false;
  bool read_only = false;
  std::int32_t pad_slot_id = -1;
  Sizes read, written;  ///< slots

  StateSlots slots() const {
    StateSlots slots{.pad_slot_id = pad_slot_id};
    if (indices) slots.indices = indices->view();
    if (out_indices) slots.out_indices = out_indices->view();
    if (table) slots.table = table->view();
    if (out_table) slots.out_table = out_table->view();
    if (accepted) slots.num_accepted = accepted->view();
    return slots;
  }
  template <class T, std::size_t Rank>
  static std::optional<TensorView<const T, Rank>> view_of(const std::optional<Array<T, Rank>>& a) {
    return a ? std::optional(a->view()) : std::nullopt;
  }
  Named arguments() const {
    Named named{{"pad_slot_id", std::int64_t{pad_slot_id}}};
    const auto give = [&](const char* argument, const auto& array) {
      if (array) named[argument] = tensor_of(*array);
    };
    give("query_start_loc", starts);
    give("state_indices", indices);
    give("state_indices", table);
    give("state_out_indices", out_indices);
    give("state_out_indices", out_table);
    give("num_accepted_tokens", accepted);
    give("parents", parents);
    if (read_only) named["read_only"] = true;
    return named;
  }
};

/// Rows of 2, 0, 1 and 3 tokens, the third one padding, and a token after them.
Ints starts() {
  return ints({0, 2, 2, 3, 6});
}

std::vector<Question> questions() {
  const auto indices = ints({4, 1, -1, 7});
  return {
      {.name = "a token per row",
       .indices = ints({4, 1, -1, 7, 0, 8, 2}),
       .read = {4, 1, 7, 0, 8, 2},
       .written = {4, 1, 7, 0, 8, 2}},
      {.name = "slot 0 is padding",
       .indices = ints({4, 1, 0, 7, -3, 8, 2}),
       .pad_slot_id = 0,
       .read = {4, 1, 7, 8, 2},
       .written = {4, 1, 7, 8, 2}},
      {.name = "no indices", .read = {0, 1, 2, 3, 4, 5, 6}, .written = {0, 1, 2, 3, 4, 5, 6}},
      {.name = "packed rows",
       .starts = starts(),
       .indices = indices,
       .read = {4, 7},
       .written = {4, 7}},
      {.name = "snapshots",
       .starts = starts(),
       .indices = indices,
       .snapshots = true,
       .read = {4, 7},
       .written = {}},
      {.name = "a tree",
       .starts = starts(),
       .indices = indices,
       .parents = ints({-1, 0, -1, -1, 0, 0, -1}),
       .snapshots = true,
       .read = {4, 7},
       .written = {}},
      {.name = "a tree with an invalid token",
       .starts = starts(),
       .indices = indices,
       .parents = ints({-1, 1, -1, -1, -2, 1, -1}),
       .read = {4, 7},
       .written = {}},
  };
}

/// Those that a convolution does not know.
std::vector<Question> recurrence_questions() {
  std::vector<Question> all = questions();
  all.push_back({.name = "other slots for the new states",
                 .starts = starts(),
                 .indices = ints({4, 1, -1, 7}),
                 .out_indices = ints({5, 2, 3, -1}),
                 .read = {4, 7},
                 .written = {5}});
  all.push_back({.name = "a table",
                 .starts = starts(),
                 .table = table_of({{0, 1, 2}, {3, 4, -1}, {-1, -1, -1}, {5, -1, 8}}),
                 .accepted = ints({2, 0, 1, 3}),
                 .read = {1, 8},
                 .written = {0, 1, 5, 8}});
  all.push_back({.name = "a table of other slots for the new states",
                 .starts = starts(),
                 .table = table_of({{0, 1, 2}, {3, 4, -1}, {-1, -1, -1}, {5, -1, 8}}),
                 .out_table = table_of({{7, 4}, {-1, -1}, {0, 0}, {6, -1}}),
                 .accepted = ints({2, 0, 1, 3}),
                 .read = {1, 8},
                 .written = {7, 4, 6}});
  all.push_back({.name = "only read, by rows that share",
                 .starts = starts(),
                 .indices = ints({4, 4, -1, 4}),
                 .read_only = true,
                 .read = {4},
                 .written = {}});
  return all;
}

struct Types {
  at::ScalarType activations, state;
};

const Types kServed{at::kBFloat16, at::kFloat};

std::vector<Types> all_types() {
  std::vector<Types> all;
  for (const auto x : {at::kFloat, at::kBFloat16, at::kHalf})
    for (const auto s : {at::kFloat, at::kBFloat16, at::kHalf}) all.push_back({x, s});
  return all;
}

StoragePoints storage_of(const Types& types) {
  return {.state = format_of(types.state), .output = format_of(types.activations)};
}

/// Test data that is exact in every type.
template <std::size_t Rank>
Array<float, Rank> draw(const Shape<Rank>& shape, std::uint64_t stream) {
  return on_grid<float>(shape, {.seed = 5, .stream = stream});
}

// --- What came ----------------------------------------------------------------------------------

template <std::size_t Rank>
::testing::AssertionResult is(const Tensor& tensor, const Array<float, Rank>& expected) {
  const auto found = array_of<float, Rank>(tensor);
  if (same_bits(found, expected)) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << "not the reference's:\n"
                                       << tensor << "\ninstead of\n"
                                       << tensor_of(expected);
}

/// The states as a tensor, with bytes 0xff in the slots that nobody reads.
template <std::size_t Rank>
Tensor pool_of(const Array<float, Rank>& states, at::ScalarType type, const Sizes& read) {
  const Tensor pool = tensor_of(states).to(type).contiguous();
  for (std::int64_t slot = 0; slot < pool.size(0); ++slot)
    if (std::ranges::find(read, slot) == read.end())
      std::memset(pool.select(0, slot).data_ptr(), 0xff, pool.select(0, slot).nbytes());
  return pool;
}

/// Written slots hold what the reference's hold; the others the bytes that they had.
template <std::size_t Rank>
void expect_states(const Tensor& pool, const Tensor& before, const Array<float, Rank>& expected,
                   const Sizes& written) {
  const Tensor wanted = tensor_of(expected);
  for (std::int64_t slot = 0; slot < pool.size(0); ++slot) {
    const bool is_written = std::ranges::find(written, slot) != written.end();
    const Tensor found = pool.select(0, slot), should = wanted.select(0, slot);
    if (is_written)
      EXPECT_EQ(bytes_of(found.to(at::kFloat)), bytes_of(should)) << "slot " << slot;
    else
      EXPECT_EQ(bytes_of(found), bytes_of(before.select(0, slot))) << "slot " << slot;
  }
}

/// Snapshots of the tokens that have a row with a slot; the other bytes are as they were.
template <std::size_t Rank>
void expect_snapshots(const Tensor& snapshots, const Array<float, Rank>& expected) {
  expect_states(snapshots, at::full_like(snapshots, 7), expected, {0, 1, 3, 4, 5});
}

// --- causal_conv1d_update -----------------------------------------------------------------------

struct Conv {
  static constexpr std::int64_t D = 6, W = 4;
  explicit Conv(std::int64_t columns = W - 1) : states(draw<3>({kSlots, D, columns}, 4)) {}

  Array<float, 2> x = draw<2>({kTokens, D}, 1), weight = draw<2>({D, W}, 2);
  Array<float, 1> bias = draw<1>({D}, 3);
  Array<float, 3> states;

  Named arguments(const Types& types, const Question& question) const {
    Named named = question.arguments();
    named["x"] = tensor_of(x).to(types.activations);
    named["weight"] = tensor_of(weight).to(types.activations);
    named["bias"] = tensor_of(bias).to(at::kFloat);
    named["conv_state"] = pool_of(states, types.state, question.read);
    named["activation"] = "silu";
    if (question.snapshots)
      named["snapshots"] = at::full({kTokens, D, states.extent(2)}, 7, types.state);
    return named;
  }

  void expect_agreement(const Types& types, const Question& question) const {
    SCOPED_TRACE(question.name);
    const Named named = arguments(types, question);
    const Tensor pool = named.at("conv_state").toTensor(), before = pool.clone();
    const Tensor out = checked_call("causal_conv1d_update", named).at(0).toTensor();
    Array<float, 2> expected(x.shape());
    Array<float, 3> expected_states = states, shots({kTokens, D, states.extent(2)}, 7);
    reference::causal_conv1d_update<float>(
        {.x = x,
         .weight = weight,
         .bias = bias.view(),
         .query_start_loc = Question::view_of(question.starts),
         .slots = question.slots(),
         .activation = reference::Activation::silu,
         .storage = storage_of(types)},
        expected_states, expected, Question::view_of(question.parents),
        question.snapshots ? std::optional(shots.view()) : std::nullopt);
    EXPECT_EQ(out.scalar_type(), types.activations);
    EXPECT_TRUE(is(out, expected));
    expect_states(pool, before, expected_states, question.written);
    if (question.snapshots) expect_snapshots(named.at("snapshots").toTensor(), shots);
  }
};

TEST(TorchOpsConv, isTheReferenceBitByBit) {
  for (const Types& types : all_types())
    for (const Question& question : questions())
      for (const std::int64_t columns : {Conv::W - 1, Conv::W, Conv::W + 3})
        Conv(columns).expect_agreement(types, question);
}

// A pool with columns for drafts; what lies after a row's tokens keeps its bytes, NaN among them.
TEST(TorchOpsConv, aSpeculativePoolKeepsItsLaterColumns) {
  const Question question{.name = "speculative",
                          .starts = starts(),
                          .indices = ints({4, 1, -1, 7}),
                          .accepted = ints({2, 0, 1, 3}),
                          .read = {4, 7},
                          .written = {4, 7}};
  for (const Types& types : all_types()) Conv(7).expect_agreement(types, question);

  Named named = Conv(7).arguments({at::kBFloat16, at::kBFloat16}, question);
  const Tensor last = named.at("conv_state").toTensor().select(0, 4).select(1, 6);
  for (std::int64_t d = 0; d < Conv::D; ++d) std::memset(last.select(0, d).data_ptr(), 0xff, 2);
  const std::string before = bytes_of(last);
  call("causal_conv1d_update", named);
  EXPECT_EQ(bytes_of(last), before);
}

// --- selective_state_update ---------------------------------------------------------------------

struct Mamba {
  static constexpr std::int64_t H = 4, P = 3, G = 2, N = 5;
  explicit Mamba(std::uint64_t stream = 10)
      : x(draw<3>({kTokens, H, P}, stream)),
        z(draw<3>({kTokens, H, P}, stream + 1)),
        dt(draw<2>({kTokens, H}, stream + 2)),
        B(draw<3>({kTokens, G, N}, stream + 3)),
        C(draw<3>({kTokens, G, N}, stream + 4)) {
    for (float& a : A) a = -1.0f / 64 - std::abs(a);
  }

  Array<float, 3> x, z;
  Array<float, 2> dt;
  Array<float, 3> B, C;
  Array<float, 1> A = draw<1>({H}, 20), D = draw<1>({H}, 21), dt_bias = draw<1>({H}, 22);
  Array<float, 4> states = draw<4>({kSlots, H, P, N}, 23);

  Named arguments(const Types& types, const Question& question) const {
    Named named = question.arguments();
    const auto give = [&](const char* name, const auto& array, at::ScalarType type) {
      named[name] = tensor_of(array).to(type);
    };
    give("x", x, types.activations), give("z", z, types.activations);
    give("B", B, types.activations), give("C", C, types.activations);
    give("dt", dt, types.activations), give("dt_bias", dt_bias, at::kFloat);
    give("A", A, at::kFloat), give("D", D, types.activations);
    named["dt_softplus"] = true, named["dt_min"] = 0.5, named["dt_max"] = 1.25;
    named["state"] = pool_of(states, types.state, question.read);
    if (question.snapshots) named["snapshots"] = at::full({kTokens, H, P, N}, 7, types.state);
    return named;
  }

  reference::Mamba2Inputs<float> inputs(const Types& types, const Question& question) const {
    return {.x = x,
            .dt = repeat(dt.view(), P),
            .A = repeat(repeat(A.view(), P), N),
            .B = B,
            .C = C,
            .D = repeat(D.view(), P),
            .z = z.view(),
            .dt_bias = repeat(dt_bias.view(), P),
            .dt_softplus = true,
            .dt_min = 0.5f,
            .dt_max = 1.25f,
            .rows = {.tokens = kTokens,
                     .query_start_loc = Question::view_of(question.starts),
                     .slots = question.slots(),
                     .storage = storage_of(types)}};
  }

  void expect_agreement(const Types& types, const Question& question) const {
    SCOPED_TRACE(question.name);
    const Named named = arguments(types, question);
    const Tensor pool = named.at("state").toTensor(), before = pool.clone();
    const Tensor out = checked_call("selective_state_update", named).at(0).toTensor();
    Array<float, 3> expected(x.shape());
    Array<float, 4> expected_states = states, shots({kTokens, H, P, N}, 7);
    reference::selective_state_update<float>(
        inputs(types, question), expected_states, expected, Question::view_of(question.parents),
        question.snapshots || question.read_only ? std::optional(shots.view()) : std::nullopt);
    EXPECT_EQ(out.scalar_type(), types.activations);
    EXPECT_TRUE(is(out, expected));
    expect_states(pool, before, expected_states, question.written);
    if (question.snapshots) expect_snapshots(named.at("snapshots").toTensor(), shots);
  }
};

TEST(TorchOpsMamba2, isTheReferenceBitByBit) {
  for (const Types& types : all_types())
    for (const Question& question : recurrence_questions())
      Mamba().expect_agreement(types, question);
}

// Servers that compute B and C in float32 need not round them to the type of x.
TEST(TorchOpsMamba2, vectorsInFloat32StandBesideOtherActivations) {
  const Question question = questions()[3];
  const Named same = Mamba().arguments(kServed, question);
  Named wide = copies_of(same);
  for (const char* name : {"B", "C"}) wide[name] = wide.at(name).toTensor().to(at::kFloat);
  const Tensor expected = call("selective_state_update", same).at(0).toTensor();
  EXPECT_TRUE(at::equal(call("selective_state_update", wide).at(0).toTensor(), expected));
  EXPECT_EQ(bytes_of(wide.at("state").toTensor()), bytes_of(same.at("state").toTensor()));
}

// A limit of the time step is no filter for NaN.
TEST(TorchOpsMamba2, aTimeStepThatIsNaNStaysNaN) {
  const Named named = Mamba().arguments(kServed, questions()[3]);
  named.at("dt").toTensor()[0][1] = std::numeric_limits<float>::quiet_NaN();
  const Tensor out = call("selective_state_update", named).at(0).toTensor();
  EXPECT_TRUE(out[0][1].isnan().all().item<bool>());
  EXPECT_FALSE(out[0][0].isnan().any().item<bool>());
}

// mamba-ssm hands its A, dt, D and dt_bias expanded by strides of 0; a copy of them is another
// recurrence (Mamba1's) with the same numbers.
TEST(TorchOpsMamba2, expandedHeadsAreOneNumberPerHead) {
  const Question question = questions()[3];
  const Types types{at::kBFloat16, at::kFloat};
  const Named plain = Mamba().arguments(types, question);
  Named expanded = copies_of(plain);
  const auto expand = [&](const char* name, std::vector<std::int64_t> shape) {
    Tensor wide = expanded.at(name).toTensor();
    while (wide.dim() < static_cast<std::int64_t>(shape.size())) wide = wide.unsqueeze(-1);
    expanded[name] = wide.expand(shape);
  };
  expand("A", {Mamba::H, Mamba::P, Mamba::N}), expand("dt", {kTokens, Mamba::H, Mamba::P});
  expand("D", {Mamba::H, Mamba::P}), expand("dt_bias", {Mamba::H, Mamba::P});
  const Named before = copies_of(plain);
  const auto a = call("selective_state_update", plain).at(0).toTensor();
  const auto b = checked_call("selective_state_update", expanded).at(0).toTensor();
  EXPECT_EQ(bytes_of(a), bytes_of(b));
  EXPECT_EQ(bytes_of(plain.at("state").toTensor()), bytes_of(expanded.at("state").toTensor()));
  EXPECT_NE(bytes_of(plain.at("state").toTensor()), bytes_of(before.at("state").toTensor()));
}

/// Launches of one token for the tokens that a commit takes, token after token.
template <class Layer>
void decode_accepted(const char* name, const Layer& layer, const Types& types,
                     const Question& question, const std::vector<Sizes>& taken,
                     const Tensor& state) {
  std::size_t most = 0;
  for (const Sizes& tokens : taken) most = std::max(most, tokens.size());
  for (std::size_t i = 0; i < most; ++i) {
    Sizes slots(kTokens, -1);
    for (std::size_t row = 0; row < taken.size(); ++row)
      if (i < taken[row].size())
        slots[static_cast<std::size_t>(taken[row][i])] =
            (*question.indices)(static_cast<std::int64_t>(row));
    Named step = layer.arguments(types, question);
    step.erase("query_start_loc");
    step.erase("read_only");
    step["state_indices"] = tensor_of(ints(slots));
    step["state"] = state;
    call(name, step);
  }
}

/// A verification that only reads, and what is accepted of it: tokens 0, 1 of row 0 and 3, 4 of row
/// 3, or by nodes 1 of row 0 and 3, 5 of row 3.
struct Commit {
  Question verification{.name = "verification",
                        .starts = starts(),
                        .indices = ints({4, 1, -1, 7}),
                        .read_only = true,
                        .read = {4, 7},
                        .written = {}};
  Ints accepted = ints({2, 3, 1, 2});
  std::vector<Sizes> taken{{0, 1}, {}, {}, {3, 4}};
  Ints accepted_nodes = ints({1, 0, 1, 3});
  Table nodes = table_of({{1, -1, -1}, {0, 1, 2}, {0, 1, 2}, {0, 9, 2}});
  std::vector<Sizes> taken_nodes{{1}, {}, {}, {3, 5}};
};

// A verification that leaves its stash, then a commit, is the accepted decodes.
TEST(TorchOpsMamba2, replayIsTheAcceptedDecodesBitByBit) {
  const Commit commit;
  const Mamba layer;
  for (const Types& types : all_types())
    for (const bool by_nodes : {false, true}) {
      Named verify = layer.arguments(types, commit.verification);
      verify["stash_decay"] = at::full({kTokens, Mamba::H}, 7, at::kFloat);
      verify["stash_dt"] = at::full({kTokens, Mamba::H}, 7, at::kFloat);
      const Tensor state = verify.at("state").toTensor(), before = state.clone();
      checked_call("selective_state_update", verify);
      EXPECT_EQ(bytes_of(state), bytes_of(before));
      // The row without a slot, and what stands after the rows, have no stash.
      const Tensor stashed = verify.at("stash_dt").toTensor().ne(7).all(1);
      EXPECT_EQ(bytes_of(stashed.to(at::kInt)), bytes_of(tensor_of(ints({1, 1, 0, 1, 1, 1, 0}))));

      Named replay{{"state", state}};
      for (const char* name :
           {"stash_decay", "stash_dt", "x", "B", "query_start_loc", "state_indices", "pad_slot_id"})
        replay[name] = verify.at(name);
      replay["num_accepted_tokens"] = tensor_of(by_nodes ? commit.accepted_nodes : commit.accepted);
      if (by_nodes) replay["nodes"] = tensor_of(commit.nodes);
      checked_call("selective_state_replay", replay);

      const Tensor decoded = before.clone();
      decode_accepted("selective_state_update", layer, types, commit.verification,
                      by_nodes ? commit.taken_nodes : commit.taken, decoded);
      EXPECT_NE(bytes_of(state), bytes_of(before));
      EXPECT_EQ(bytes_of(state), bytes_of(decoded));
    }
}

// Narrow states with scales: the reference of the same name, rounded to nearest or by a seed.
TEST(TorchOpsMamba2, scaledStatesAreTheReferences) {
  const Mamba layer;
  for (const at::ScalarType narrow : {at::kChar, at::kFloat8_e4m3fn})
    for (const std::int64_t blocks : {1, 2, 5})
      for (const bool stochastic : {false, true})
        for (const Question& question : recurrence_questions()) {
          if (question.snapshots) continue;
          SCOPED_TRACE(question.name);
          const Format format = narrow == at::kChar ? Format::int8 : Format::e4m3;
          const Types types{at::kBFloat16, at::kFloat};
          Array<float, 4> numbers = layer.states, scales = draw<4>({kSlots, 4, 3, blocks}, 30);
          for (float& number : numbers) number = rounded(number * 64, format);
          for (float& scale : scales) scale = 1.0f / 64 + std::abs(scale);
          Named named = layer.arguments(types, question);
          named["state"] = tensor_of(numbers).to(narrow);
          named["state_scale"] = tensor_of(scales);
          if (blocks > 1) named["scale_block"] = (5 + blocks - 1) / blocks;
          if (stochastic) named["rand_seed"] = std::int64_t{11};
          const Tensor pool = named.at("state").toTensor(), before = pool.clone();
          const Tensor scale_pool = named.at("state_scale").toTensor(),
                       scales_before = scale_pool.clone();
          const Tensor out = checked_call("selective_state_update", named).at(0).toTensor();

          reference::ScaledStates<float> states{numbers, scales, (5 + blocks - 1) / blocks, format};
          if (stochastic) states.stochastic = {.seed = 11};
          Array<float, 3> expected(layer.x.shape());
          Array<float, 4> shots({kTokens, 4, 3, 5});
          auto in = layer.inputs(types, question);
          in.rows.storage.state = Format::exact;
          const bool reads_only = question.read_only || question.parents;
          reference::with_scaled_states<float>(
              reads_only ? Rows{} : in.rows, states, [&](const TensorView<float, 4>& plain) {
                reference::selective_state_update<float>(
                    in, plain, expected, Question::view_of(question.parents),
                    question.read_only ? std::optional(shots.view()) : std::nullopt);
              });
          EXPECT_TRUE(is(out, expected));
          expect_states(pool, before, numbers, question.written);
          expect_states(scale_pool, scales_before, scales, question.written);
        }
}

// --- gated_delta_rule_update --------------------------------------------------------------------

struct Delta {
  static constexpr std::int64_t H = 2, HV = 4, K = 5, V = 3;
  explicit Delta(std::uint64_t stream = 40)
      : q(draw<3>({kTokens, H, K}, stream)),
        k(draw<3>({kTokens, H, K}, stream + 1)),
        v(draw<3>({kTokens, HV, V}, stream + 2)),
        a(draw<2>({kTokens, HV}, stream + 3)),
        b(draw<2>({kTokens, HV}, stream + 4)) {}

  Array<float, 3> q, k, v;
  Array<float, 2> a, b;
  Array<float, 1> A_log = draw<1>({HV}, 50), dt_bias = draw<1>({HV}, 51);
  Array<float, 4> states = draw<4>({kSlots, HV, V, K}, 52);

  Named arguments(const Types& types, const Question& question) const {
    Named named = question.arguments();
    const auto give = [&](const char* name, const auto& array, at::ScalarType type) {
      named[name] = tensor_of(array).to(type);
    };
    give("q", q, types.activations), give("k", k, types.activations);
    give("v", v, types.activations);
    give("g", a, types.activations), give("beta", b, types.activations);
    give("A_log", A_log, at::kFloat), give("dt_bias", dt_bias, at::kFloat);
    named["use_qk_l2norm"] = true, named["scale"] = 0.75;
    named["state"] = pool_of(states, types.state, question.read);
    if (question.snapshots) named["snapshots"] = at::full({kTokens, HV, V, K}, 7, types.state);
    return named;
  }

  reference::GatedDeltaGates<float> gates() const {
    return reference::gated_delta_gates<float>(a.view(), b.view(), A_log.view(), dt_bias.view());
  }

  void expect_agreement(const Types& types, const Question& question, bool raw_gates) const {
    SCOPED_TRACE(question.name);
    const auto ready = gates();
    Named named = arguments(types, question);
    if (!raw_gates) {
      named["g"] = tensor_of(ready.g), named["beta"] = tensor_of(ready.beta);
      named.erase("A_log"), named.erase("dt_bias");
    }
    const Tensor pool = named.at("state").toTensor(), before = pool.clone();
    const Tensor out = checked_call("gated_delta_rule_update", named).at(0).toTensor();
    Array<float, 3> expected(v.shape());
    Array<float, 4> expected_states = states, shots({kTokens, HV, V, K}, 7);
    reference::gated_delta_rule_update<float>(
        {.q = q,
         .k = k,
         .v = v,
         .g = ready.g,
         .beta = ready.beta,
         .scale = 0.75f,
         .use_qk_l2norm = true,
         .rows = {.query_start_loc = Question::view_of(question.starts),
                  .slots = question.slots(),
                  .storage = storage_of(types)}},
        expected_states, expected, Question::view_of(question.parents),
        question.snapshots || question.read_only ? std::optional(shots.view()) : std::nullopt);
    EXPECT_EQ(out.scalar_type(), types.activations);
    EXPECT_TRUE(is(out, expected));
    expect_states(pool, before, expected_states, question.written);
    if (question.snapshots) expect_snapshots(named.at("snapshots").toTensor(), shots);
  }
};

TEST(TorchOpsGatedDelta, isTheReferenceBitByBit) {
  for (const Types& types : all_types())
    for (const Question& question : recurrence_questions())
      for (const bool raw_gates : {false, true})
        Delta().expect_agreement(types, question, raw_gates);
}

// A K-major pool is the same states by strides.
TEST(TorchOpsGatedDelta, aKMajorPoolServesAsWell) {
  const Question question = questions()[3];
  for (const Types& types : all_types()) {
    const Named plain = Delta().arguments(types, question);
    Named turned = copies_of(plain);
    turned["state"] = plain.at("state").toTensor().transpose(2, 3).contiguous().transpose(2, 3);
    const Tensor a = call("gated_delta_rule_update", plain).at(0).toTensor();
    const Tensor b = checked_call("gated_delta_rule_update", turned).at(0).toTensor();
    EXPECT_EQ(bytes_of(a), bytes_of(b));
    EXPECT_EQ(bytes_of(plain.at("state").toTensor()), bytes_of(turned.at("state").toTensor()));
  }
}

Named replay_of(const Named& verify, const Ints& accepted, const std::optional<Table>& nodes) {
  Named replay{{"num_accepted_tokens", tensor_of(accepted)}};
  for (const char* name : {"k", "v", "g", "beta", "state", "A_log", "dt_bias", "query_start_loc",
                           "state_indices", "use_qk_l2norm", "pad_slot_id"})
    replay[name] = verify.at(name);
  if (nodes) replay["nodes"] = tensor_of(*nodes);
  return replay;
}

TEST(TorchOpsGatedDelta, replayIsTheAcceptedDecodesBitByBit) {
  const Commit commit;
  const Delta layer;
  for (const Types& types : all_types())
    for (const bool by_nodes : {false, true}) {
      const Named verify = layer.arguments(types, commit.verification);
      const Tensor state = verify.at("state").toTensor(), before = state.clone();
      checked_call("gated_delta_rule_update", verify);
      EXPECT_EQ(bytes_of(state), bytes_of(before));
      checked_call("gated_delta_rule_replay",
                   by_nodes ? replay_of(verify, commit.accepted_nodes, commit.nodes)
                            : replay_of(verify, commit.accepted, {}));
      const Tensor decoded = before.clone();
      decode_accepted("gated_delta_rule_update", layer, types, commit.verification,
                      by_nodes ? commit.taken_nodes : commit.taken, decoded);
      EXPECT_NE(bytes_of(state), bytes_of(before));
      EXPECT_EQ(bytes_of(state), bytes_of(decoded));
    }
}

// A commit within the next verification is a commit before it.
TEST(TorchOpsGatedDelta, aFoldIsAReplayAndThenTheVerification) {
  const Commit commit;
  const Delta earlier(60), next(40);
  for (const Types& types : all_types()) {
    Named folding = next.arguments(types, commit.verification);
    const Named before = copies_of(folding), old = earlier.arguments(types, commit.verification);
    for (const char* name : {"k", "v", "g", "beta", "query_start_loc"})
      folding[std::string("fold_") + name] = old.at(name);
    folding["fold_num_accepted_tokens"] = tensor_of(commit.accepted);
    folding.erase("read_only");
    const Tensor out = checked_call("gated_delta_rule_update", folding).at(0).toTensor();

    Named apart = copies_of(before);
    Named replay = replay_of(old, commit.accepted, {});
    replay["state"] = apart.at("state");
    call("gated_delta_rule_replay", replay);
    const Tensor expected = call("gated_delta_rule_update", apart).at(0).toTensor();
    EXPECT_EQ(bytes_of(out), bytes_of(expected));
    const Tensor state = folding.at("state").toTensor();
    EXPECT_EQ(bytes_of(state), bytes_of(apart.at("state").toTensor()));
    EXPECT_NE(bytes_of(state), bytes_of(before.at("state").toTensor()));
  }
}

// --- state_copy, state_zero, state_scatter_accepted ---------------------------------------------

/// A pool [layers, slots, rows of 16 elements] of whatever bytes.
Tensor pool_of_bytes(at::ScalarType type) {
  const Tensor numbers = at::arange(2 * 6 * 16 * 8, at::kLong).mul(2654435761).bitwise_and(0xff);
  const Tensor bytes = numbers.to(at::kByte);
  return bytes.slice(0, 0, 2 * 6 * 16 * static_cast<std::int64_t>(c10::elementSize(type)))
      .clone()
      .view(type)
      .view({2, 6, 16});
}

const std::vector<at::ScalarType> kPoolTypes{at::kFloat, at::kBFloat16, at::kHalf, at::kChar,
                                             at::kFloat8_e4m3fn};

TEST(TorchOpsPool, movesAreDoneAsIfAllSourcesWereReadFirst) {
  for (const at::ScalarType type : kPoolTypes) {
    const Tensor pool = pool_of_bytes(type), before = pool.clone();
    const Ints source = ints({0, 1, 2, -1, 4}), target = ints({1, 2, 0, 3, -1});
    checked_call("state_copy",
                 {{"state", pool}, {"source", tensor_of(source)}, {"target", tensor_of(target)}});
    const std::vector<std::int64_t> from{2, 0, 1, 3, 4, 5};
    for (std::int64_t slot = 0; slot < 6; ++slot)
      EXPECT_EQ(bytes_of(pool.select(1, slot)),
                bytes_of(before.select(1, from[static_cast<std::size_t>(slot)])));
  }
  Array<float, 3> states = draw<3>({2, 6, 16}, 70);
  const Tensor pool = tensor_of(states);
  const Ints source = ints({3, 1, 5}), target = ints({0, 3, 1});
  call("state_copy",
       {{"state", pool}, {"source", tensor_of(source)}, {"target", tensor_of(target)}});
  reference::copy_states(states, source.view(), target.view());
  EXPECT_TRUE(is(pool, states));
}

TEST(TorchOpsPool, zeroedSlotsAreZeroAndOthersStay) {
  for (const at::ScalarType type : kPoolTypes) {
    const Tensor pool = pool_of_bytes(type), before = pool.clone();
    checked_call("state_zero", {{"state", pool}, {"slots", tensor_of(ints({4, -1, 0, 4}))}});
    for (std::int64_t slot = 0; slot < 6; ++slot) {
      const std::string found = bytes_of(pool.select(1, slot));
      EXPECT_EQ(found, slot == 0 || slot == 4 ? std::string(found.size(), '\0')
                                              : bytes_of(before.select(1, slot)));
    }
  }
}

TEST(TorchOpsPool, acceptedHistoriesMoveToTheFront) {
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16, at::kHalf}) {
    const Tensor pool = pool_of_bytes(type).view({2, 6, 2, 8}), before = pool.clone();
    const Sizes slots{4, 0, -1, 2, 5, 1}, accepted{3, 1, 2, 6, 7, 0};
    checked_call("conv_state_shift", {{"state", pool},
                                      {"state_indices", tensor_of(ints(slots))},
                                      {"num_accepted_tokens", tensor_of(ints(accepted))},
                                      {"width", 4}});
    Tensor expected = before.clone();  // six columns back, the three of seven do not fit
    for (const auto& [slot, first] : {std::pair{4, 2}, std::pair{2, 5}})
      expected.select(1, slot).narrow(-1, 0, 3).copy_(before.select(1, slot).narrow(-1, first, 3));
    EXPECT_EQ(bytes_of(pool), bytes_of(expected));
  }
}

TEST(TorchOpsPool, acceptedSnapshotsBecomeStates) {
  const Ints slots = ints({4, 0, -1, 2}), accepted = ints({3, 0, 1, 1});
  for (const at::ScalarType type : kPoolTypes) {
    const Tensor pool = pool_of_bytes(type)[0], before = pool.clone();
    const Tensor shots = pool_of_bytes(type).view({4, 3, 16});
    checked_call("state_scatter_accepted", {{"state", pool},
                                            {"intermediate", shots},
                                            {"slots", tensor_of(slots)},
                                            {"num_accepted_tokens", tensor_of(accepted)}});
    for (std::int64_t slot = 0; slot < 6; ++slot)
      EXPECT_EQ(bytes_of(pool[slot]), bytes_of(slot == 4   ? shots[0][2]
                                               : slot == 2 ? shots[3][0]
                                                           : before[slot]));
  }
  Array<float, 2> states = draw<2>({6, 16}, 71);
  const Array<float, 3> shots = draw<3>({4, 3, 16}, 72);
  const Tensor pool = tensor_of(states);
  call("state_scatter_accepted", {{"state", pool},
                                  {"intermediate", tensor_of(shots)},
                                  {"slots", tensor_of(slots)},
                                  {"num_accepted_tokens", tensor_of(accepted)}});
  reference::scatter_accepted(states.view(), shots.view(), slots.view(), accepted.view());
  EXPECT_TRUE(is(pool, states));
}

// --- Schemas ------------------------------------------------------------------------------------

/// Text with each run of white space as one space.
std::string on_one_line(const std::string& text) {
  std::string result;
  for (const char c : text) {
    const bool space = c == ' ' || c == '\n';
    if (!space || (!result.empty() && result.back() != ' ')) result += space ? ' ' : c;
  }
  return result;
}

struct SchemaText {
  std::vector<std::string> arguments;
  std::string results;
};

/// The schemas NAME(…) -> … of a text, in its order.
std::vector<SchemaText> schemas_in(const std::string& text, const std::string& name) {
  std::vector<SchemaText> found;
  for (std::size_t at = 0; (at = text.find(name + "(", at)) != std::string::npos; ++at) {
    if (at > 0 && (std::isalnum(text[at - 1]) || text[at - 1] == '_')) continue;
    const std::size_t arrow = text.find(") -> ", at);
    if (arrow == std::string::npos) continue;
    SchemaText schema;
    std::string rest = text.substr(at + name.size() + 1, arrow - at - name.size() - 1);
    for (std::size_t comma; (comma = rest.find(", ")) != std::string::npos;) {
      schema.arguments.push_back(rest.substr(0, comma));
      rest = rest.substr(comma + 2);
    }
    schema.arguments.push_back(rest);
    schema.results = text.substr(arrow + 5, 2) == "()" ? "()" : text.substr(arrow + 5, 6);
    found.push_back(schema);
  }
  return found;
}

std::set<std::string> operators() {
  operator_named("state_copy");  // loads the library
  std::set<std::string> names;
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames())
    if (name.name.starts_with("lockstep::")) names.insert(name.name.substr(10));
  return names;
}

/// The operators whose schemas stand at the beginning of a line of the page's blocks.
std::set<std::string> operators_of_page(const std::string& page) {
  std::set<std::string> names;
  std::istringstream lines(page);
  bool in_block = false;
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("```")) in_block = !in_block;
    if (const std::size_t open = line.find('('); in_block && open != std::string::npos && open > 0)
      if (const std::string name = line.substr(0, open); name.find(' ') == std::string::npos)
        names.insert(name);
  }
  return names;
}

/// The first difference between the page and the library about one operator; nothing where they
/// agree.
std::string difference(const std::string& page, const std::string& name) {
  std::ostringstream printed;
  printed << operator_named(name).schema();
  const std::vector<SchemaText> found = schemas_in(printed.str(), name);
  const std::vector<SchemaText> told = schemas_in(on_one_line(page), name);
  if (told.size() != 1) return "the page has " + std::to_string(told.size()) + " schemas of it";
  if (told[0].arguments != found.at(0).arguments) return "other arguments";
  return told[0].results == found[0].results ? "" : "other results";
}

// Every operator has its schema in the page, and every schema there is registered. A caller finds
// its arguments where the page says.
TEST(TorchOpsSchemas, areThePages) {
  std::ifstream file(LOCKSTEP_SOURCE_DIR "/kernels/torch/operators.md");
  const std::string page{std::istreambuf_iterator<char>(file), {}};
  EXPECT_EQ(operators_of_page(page), operators());
  EXPECT_GE(operators().size(), 15u);
  for (const std::string& name : operators()) EXPECT_EQ(difference(page, name), "") << name;
}

// The rule can fail: an argument that is renamed or left out, an operator that is nobody's.
TEST(TorchOpsSchemas, aChangedPageIsNoticed) {
  std::ifstream file(LOCKSTEP_SOURCE_DIR "/kernels/torch/operators.md");
  const std::string page{std::istreambuf_iterator<char>(file), {}};
  const auto changed = [&](const std::string& from, const std::string& to) {
    std::string text = page;
    const std::size_t at = text.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    return text.replace(at, from.size(), to);
  };
  EXPECT_NE(difference(changed("int chunk_size=128", "int chunk=128"), "ssd_prefill"), "");
  EXPECT_NE(difference(changed(", Tensor target) -> ()", ") -> ()"), "state_copy"), "");
  EXPECT_NE(difference(changed("state_zero(", "state_nil("), "state_zero"), "");
  EXPECT_NE(operators_of_page(changed("state_zero(", "state_nil(")), operators());
}

// --- Refusals -----------------------------------------------------------------------------------

Tensor zeros(std::vector<std::int64_t> shape, at::ScalarType type = at::kFloat) {
  return at::zeros(shape, type);
}
Tensor list(const Sizes& values) {
  return tensor_of(ints(values));
}

/// Of this shape in the served type, with the elements of a row apart.
Tensor transposed_rows(std::vector<std::int64_t> shape) {
  std::swap(shape[1], shape[2]);
  return zeros(shape, at::kBFloat16).transpose(1, 2);
}

/// Refusals that every operator over packed rows shares.
std::vector<Refusal> row_refusals() {
  return {{"query_start_loc", list({1, 2, 2, 3, 6})},
          {"query_start_loc", list({0, 2, 1, 3, 6})},
          {"query_start_loc", list({0, 2, 2, 3, 8})},
          {"query_start_loc", list({0, 2, 2, 3, 6}).to(at::kLong)},
          {"query_start_loc", zeros({5, 1}, at::kInt)},
          {"state_indices", list({4, 1, -1, 9})},
          {"state_indices", list({4, 1, -1})},
          {"state_indices", list({4, 1, -1, 4})},
          {"state_indices", list({4, 1, -1, 7}).to(at::kLong)},
          {"state_indices", zeros({4, 1, 1}, at::kInt)},
          {"pad_slot_id", std::int64_t{1} << 40}};
}

std::vector<Refusal> with_row_refusals(std::vector<Refusal> refusals) {
  for (const Refusal& refusal : row_refusals()) refusals.push_back(refusal);
  return refusals;
}

TEST(TorchOpsRefuse, aConvolutionsBadArgumentsByName) {
  const std::int64_t D = Conv::D, W = Conv::W;
  const Question packed = questions()[3];
  expect_refusals(
      "causal_conv1d_update", Conv().arguments(kServed, packed),
      with_row_refusals({{"x", zeros({kTokens, D, 1})},
                         {"x", zeros({kTokens, D}, at::kDouble)},
                         {"x", zeros({kTokens, D}).to(at::kMeta), "is expected to be on"},
                         {"weight", zeros({D + 1, W})},
                         {"weight", zeros({D, 5})},
                         {"weight", zeros({D, W}, at::kInt)},
                         {"bias", zeros({D + 1})},
                         {"bias", zeros({D}, at::kLong)},
                         {"bias", zeros({D}).to(at::kMeta)},
                         {"conv_state", zeros({kSlots, D})},
                         {"conv_state", zeros({kSlots, D + 1, W - 1})},
                         {"conv_state", zeros({kSlots, D, W - 2})},
                         {"conv_state", zeros({kSlots, D, W - 1}, at::kDouble)},
                         {"num_accepted_tokens", list({1, 1, 1})},
                         {"num_accepted_tokens", list({1, 1, 1, 1}), "conv_state"},
                         {"parents", list({-1, 0})},
                         {"parents", zeros({kTokens}, at::kLong)},
                         {"snapshots", zeros({kTokens, D, W})},
                         {"snapshots", zeros({kTokens, D, W - 1}, at::kHalf)},
                         {"activation", "gelu"}}));
  expect_refusals("causal_conv1d_update", Conv().arguments(kServed, questions()[4]),
                  {{"num_accepted_tokens", list({1, 1, 1, 1})}});
  Named speculative = Conv(6).arguments(kServed, packed);
  speculative["num_accepted_tokens"] = list({4, 0, 9, 1});
  expect_refusals("causal_conv1d_update", speculative,
                  {{"num_accepted_tokens", list({5, 0, 1, 1})},
                   {"num_accepted_tokens", list({1, 0, 1, 1}).to(at::kLong)}});
}

TEST(TorchOpsRefuse, aStateUpdatesBadArgumentsByName) {
  const std::int64_t H = Mamba::H, P = Mamba::P, G = Mamba::G, N = Mamba::N;
  Named good = Mamba().arguments(kServed, questions()[3]);
  expect_refusals("selective_state_update", good,
                  with_row_refusals({{"x", zeros({kTokens, H})},
                                     {"x", zeros({kTokens, H, P}, at::kDouble)},
                                     {"dt", zeros({kTokens, H + 1})},
                                     {"dt", zeros({kTokens, H, P, 1})},
                                     {"dt", zeros({kTokens})},
                                     {"dt", zeros({})},
                                     {"A", zeros({})},
                                     {"A", zeros({H, 1, 1})},
                                     {"A", zeros({H, P})},
                                     {"D", zeros({})},
                                     {"dt_bias", zeros({1})},
                                     {"dt", zeros({kTokens, H}, at::kInt)},
                                     {"A", zeros({H}, at::kBFloat16)},
                                     {"A", zeros({H, P + 1, N})},
                                     {"B", zeros({kTokens, G})},
                                     {"B", zeros({kTokens, 3, N})},
                                     {"B", zeros({kTokens + 1, G, N})},
                                     {"C", zeros({kTokens, G, N + 1})},
                                     {"C", zeros({kTokens, G, N}, at::kDouble)},
                                     {"B", zeros({kTokens, G, N}, at::kHalf)},
                                     {"C", zeros({kTokens, G, N}, at::kFloat)},
                                     {"C", transposed_rows({kTokens, G, N})},
                                     {"x", transposed_rows({kTokens, H, P})},
                                     {"D", zeros({H + 1})},
                                     {"z", zeros({kTokens, H})},
                                     {"z", zeros({kTokens, H, P}, at::kInt)},
                                     {"dt_bias", zeros({H, P + 1})},
                                     {"dt_bias", zeros({H}).to(at::kMeta)},
                                     {"state", zeros({kSlots, H, P})},
                                     {"state", zeros({kSlots, H, P, N + 1})},
                                     {"state", zeros({kSlots, H, P, N}, at::kChar)},
                                     {"state_scale", zeros({kSlots, H, P, 1}), "state"},
                                     {"state_out_indices", list({5, 2, 3, 9})},
                                     {"state_out_indices", list({5, 2, 3})},
                                     {"state_out_indices", list({5, 2, 3, 5})},
                                     {"num_accepted_tokens", list({1, 1, 1, 1})},
                                     {"parents", list({-1})},
                                     {"snapshots", zeros({kTokens, H, P})},
                                     {"snapshots", zeros({kTokens, H, P, N}, at::kHalf)},
                                     {"stash_dt", zeros({kTokens, H})},
                                     {"stash_decay", zeros({kTokens, H})},
                                     {"rand_seed", std::int64_t{1}},
                                     {"scale_block", std::int64_t{1}}}));
  good["state"] = zeros({kSlots, H, P, N}, at::kChar);
  good["state_scale"] = zeros({kSlots, H, P, 2});
  good["scale_block"] = std::int64_t{3};
  expect_refusals("selective_state_update", good,
                  {{"state", zeros({kSlots, H, P, N})},
                   {"state_scale", zeros({kSlots, H, P, 2}, at::kHalf)},
                   {"state_scale", zeros({kSlots, H, P})},
                   {"state_scale", zeros({kSlots, H, P, 0})},
                   {"state_scale", zeros({kSlots, H, P, 4})},
                   {"scale_block", c10::IValue(), "state_scale"},
                   {"scale_block", std::int64_t{2}, "state_scale"},
                   {"scale_block", std::int64_t{5}, "state_scale"},
                   {"scale_block", std::int64_t{0}},
                   {"snapshots", zeros({kTokens, H, P, N}, at::kChar)}});
  good = Mamba().arguments(kServed, recurrence_questions()[8]);
  expect_refusals("selective_state_update", good,
                  {{"num_accepted_tokens", list({4, 1, 1, 1})},
                   {"num_accepted_tokens", list({1, 1, 1})},
                   {"state_out_indices", list({5, 2, 3, 6})}});
  good = Mamba().arguments(kServed, questions()[3]);
  good["stash_dt"] = good["stash_decay"] = zeros({kTokens, H});
  expect_refusals("selective_state_update", good,
                  {{"stash_dt", zeros({kTokens, H + 1})},
                   {"stash_decay", zeros({kTokens, H}, at::kHalf)},
                   {"A", -at::ones({H, P, N})},
                   {"dt", zeros({kTokens, H, P})},
                   {"dt_bias", zeros({H, P})}});
}

TEST(TorchOpsRefuse, aDeltaRulesBadArgumentsByName) {
  const std::int64_t H = Delta::H, HV = Delta::HV, K = Delta::K, V = Delta::V;
  Named good = Delta().arguments(kServed, questions()[3]);
  expect_refusals("gated_delta_rule_update", good,
                  with_row_refusals({{"q", zeros({kTokens, H, K + 1})},
                                     {"q", zeros({kTokens, H, K}, at::kDouble)},
                                     {"k", zeros({kTokens, H})},
                                     {"k", zeros({kTokens, 3, K}), "state"},
                                     {"v", zeros({kTokens, HV, V + 1})},
                                     {"v", zeros({kTokens, HV, V}, at::kInt)},
                                     {"g", zeros({kTokens, HV + 1})},
                                     {"beta", zeros({kTokens})},
                                     {"beta", zeros({kTokens, HV}).to(at::kMeta)},
                                     {"A_log", zeros({HV + 1})},
                                     {"A_log", c10::IValue()},
                                     {"dt_bias", c10::IValue()},
                                     {"state", zeros({kSlots, HV, V})},
                                     {"state", zeros({kSlots, HV, V, K}, at::kChar)},
                                     {"state_out_indices", list({5, 2, 3, 9})},
                                     {"num_accepted_tokens", list({1, 1, 1, 1})},
                                     {"parents", list({-1})},
                                     {"snapshots", zeros({kTokens, HV, V})},
                                     {"snapshots", zeros({kTokens, HV, V, K}, at::kHalf)},
                                     {"fold_k", zeros({kTokens, H, K})},
                                     {"fold_query_start_loc", tensor_of(starts())},
                                     {"q", zeros({kTokens, H, K})},
                                     {"v", zeros({kTokens, HV, V}, at::kHalf)},
                                     {"k", transposed_rows({kTokens, H, K})},
                                     {"v", transposed_rows({kTokens, HV, V})},
                                     {"state_out_indices", zeros({4, 2}, at::kInt)}}));
  Named wide = good;
  for (const char* name : {"q", "k"}) wide[name] = zeros({kTokens, H, 257}, at::kBFloat16);
  wide["state"] = zeros({kSlots, HV, V, 257});
  EXPECT_TRUE(names(complaint_of("gated_delta_rule_update", wide), "state"));
  for (const char* name : {"k", "v", "g", "beta", "query_start_loc"})
    good[std::string("fold_") + name] = good.at(name);
  good["fold_num_accepted_tokens"] = list({1, 1, 1, 1});
  expect_refusals("gated_delta_rule_update", good,
                  {{"fold_k", zeros({kTokens, H, K + 1})},
                   {"fold_v", zeros({kTokens, HV, V + 1})},
                   {"fold_v", c10::IValue()},
                   {"fold_g", zeros({kTokens, HV + 1})},
                   {"fold_beta", zeros({kTokens, HV + 1})},
                   {"fold_query_start_loc", list({0, 1, 2})},
                   {"fold_num_accepted_tokens", list({1, 1})},
                   {"fold_num_accepted_tokens", list({1, 1, 1, 1}).to(at::kLong)},
                   {"fold_k", zeros({kTokens, H, K}), "fold_v"},
                   {"state_indices", tensor_of(table_of({{0, 1}, {2, 3}, {4, 5}, {6, 7}}))}});
}

TEST(TorchOpsRefuse, aPrefillsBadArgumentsByName) {
  const auto expect_rows = [](const std::string& name, Named good,
                              const std::vector<std::int64_t>& boundaries) {
    SCOPED_TRACE(name);
    std::vector<Refusal> refusals = with_row_refusals(
        {{"has_initial_state", zeros({3}, at::kBool)}, {"has_initial_state", zeros({4})}});
    if (!boundaries.empty()) {  // rows of 2, 0, 1 and 3 tokens: two places
      good["boundary_every"] = std::int64_t{2};
      good["boundary_states"] = zeros(boundaries);
      std::vector<std::int64_t> fewer = boundaries, wider = boundaries;
      fewer[0] = 1, ++wider[3];
      refusals.push_back({"boundary_states", zeros(fewer)});
      refusals.push_back({"boundary_states", zeros(wider)});
      refusals.push_back({"boundary_every", std::int64_t{0}});
      refusals.push_back({"state", c10::IValue(), "state_indices"});
    }
    expect_refusals(name, good, refusals);
  };
  const Question packed = questions()[3];
  const Named conv = Conv().arguments(kServed, packed);
  Named delta = Delta().arguments(kServed, packed), mamba = Mamba().arguments(kServed, packed);
  delta.erase("read_only"), mamba.erase("read_only");
  expect_rows("causal_conv1d", conv, {});
  expect_rows("gated_delta_rule_prefill", delta, {2, Delta::HV, Delta::V, Delta::K});
  expect_rows("ssd_prefill", mamba, {2, Mamba::H, Mamba::P, Mamba::N});
}

// No operator has a gradient: a call that would lose one is an error, not a result without it.
TEST(TorchOpsRefuse, aGradientThatIsNotThere) {
  for (const char* argument : {"x", "dt", "state"}) {
    Named named = Mamba().arguments(kServed, questions()[3]);
    named[argument] = named.at(argument).toTensor().detach().set_requires_grad(true);
    const std::string complaint = complaint_of("selective_state_update", named);
    EXPECT_TRUE(names(complaint, argument)) << complaint;
    EXPECT_NE(complaint.find("has no gradient"), std::string::npos) << complaint;
    const at::NoGradGuard nobody_asks;
    EXPECT_EQ(complaint_of("selective_state_update", named), "");
  }
}

TEST(TorchOpsRefuse, aReplaysBadArgumentsByName) {
  const Commit commit;
  const Named verify = Delta().arguments(kServed, commit.verification);
  expect_refusals("gated_delta_rule_replay", replay_of(verify, commit.accepted, commit.nodes),
                  with_row_refusals({{"k", zeros({kTokens, Delta::H})},
                                     {"v", zeros({kTokens, Delta::HV})},
                                     {"g", zeros({kTokens, 1})},
                                     {"beta", zeros({kTokens, 1})},
                                     {"state", zeros({kSlots, Delta::HV})},
                                     {"A_log", c10::IValue()},
                                     {"num_accepted_tokens", list({1, 1})},
                                     {"num_accepted_tokens", zeros({4})},
                                     {"nodes", list({1, 1, 1, 1})},
                                     {"nodes", zeros({3, 2}, at::kInt)},
                                     {"nodes", zeros({4, 2}, at::kLong)}}));
  const Named mamba = Mamba().arguments(kServed, commit.verification);
  Named replay{{"num_accepted_tokens", tensor_of(commit.accepted)},
               {"stash_decay", zeros({kTokens, Mamba::H})},
               {"stash_dt", zeros({kTokens, Mamba::H})}};
  for (const char* name : {"x", "B", "state", "query_start_loc", "state_indices", "pad_slot_id"})
    replay[name] = mamba.at(name);
  expect_refusals("selective_state_replay", replay,
                  with_row_refusals({{"stash_decay", zeros({kTokens, 1})},
                                     {"stash_dt", zeros({kTokens, Mamba::H}, at::kHalf)},
                                     {"x", zeros({kTokens, Mamba::H})},
                                     {"x", zeros({kTokens, Mamba::H, Mamba::P}, at::kInt)},
                                     {"B", zeros({kTokens, 3, Mamba::N})},
                                     {"B", zeros({1, Mamba::G, Mamba::N})},
                                     {"state", zeros({kSlots, Mamba::H})},
                                     {"num_accepted_tokens", list({1, 1})},
                                     {"nodes", zeros({3, 2}, at::kInt)}}));
}

TEST(TorchOpsRefuse, aMovesBadArgumentsByName) {
  const Tensor pool = pool_of_bytes(at::kFloat);
  expect_refusals("state_copy",
                  {{"state", pool}, {"source", list({0, 1})}, {"target", list({2, 3})}},
                  {{"state", zeros({6, 16})},
                   {"source", list({0, 6})},
                   {"source", list({0, 1}).to(at::kLong)},
                   {"target", list({2, 6})},
                   {"target", list({2, 2})},
                   {"target", list({2})},
                   {"target", list({2, 3}).to(at::kMeta)}});
  expect_refusals("conv_state_shift",
                  {{"state", zeros({2, 6, 4, 5})},
                   {"state_indices", list({0})},
                   {"num_accepted_tokens", list({2})},
                   {"width", 4}},
                  {{"state", zeros({6, 4, 5})},
                   {"state", zeros({2, 6, 4, 2})},
                   {"state", zeros({2, 6, 4, 5}, at::kDouble)},
                   {"num_accepted_tokens", list({1, 2})},
                   {"state_indices", list({6})},
                   {"width", 9},
                   {"width", 1}});
  expect_refusals("state_zero", {{"state", pool}, {"slots", list({0})}},
                  {{"state", zeros({6, 16})},
                   {"slots", list({6})},
                   {"slots", zeros({1})},
                   {"slots", zeros({1, 1}, at::kInt)}});
  expect_refusals("state_scatter_accepted",
                  {{"state", pool[0]},
                   {"intermediate", zeros({2, 3, 16})},
                   {"slots", list({0, 1})},
                   {"num_accepted_tokens", list({1, 3})}},
                  {{"state", zeros({6})},
                   {"intermediate", zeros({2, 3, 15})},
                   {"intermediate", zeros({2, 16})},
                   {"intermediate", zeros({2, 3, 16}, at::kHalf)},
                   {"slots", list({0, 6})},
                   {"slots", list({1, 1})},
                   {"slots", list({0})},
                   {"num_accepted_tokens", list({1, 4})},
                   {"num_accepted_tokens", list({1})},
                   {"num_accepted_tokens", zeros({2})}});
  // A row without an accepted token writes nothing, so its slot may be another row's.
  call("state_scatter_accepted", {{"state", pool[0]},
                                  {"intermediate", zeros({2, 3, 16})},
                                  {"slots", list({1, 1})},
                                  {"num_accepted_tokens", list({0, 3})}});
}

}  // namespace
}  // namespace lockstep::of_torch_ops
