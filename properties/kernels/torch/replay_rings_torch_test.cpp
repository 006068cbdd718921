// The operators of states that are written once in a window, on the CPU: beside those that write a
// state at each token, copied in the middle of a window, and what they refuse.
#include <ATen/ATen.h>

#include "properties/kernels/torch/torch_operator.hpp"

namespace lockstep::of_replay_rings {
namespace {

using namespace testing_support;
using at::Tensor;

constexpr std::int64_t kSlots = 6, kRows = 3, kWindow = 8;

Tensor ints(const std::vector<std::int32_t>& values) {
  return at::tensor(values, at::kInt);
}
Tensor normal(at::IntArrayRef shape, at::ScalarType type = at::kBFloat16) {
  return at::randn(shape).to(type);
}
Tensor unwritten(at::IntArrayRef shape, at::ScalarType type) {
  return at::full(shape, std::numeric_limits<float>::quiet_NaN()).to(type);
}

/// An operator with rings beside the one with snapshots: pools, a token, and how a ring is flushed.
struct Layer {
  std::string operation, snapshots, flush;
  Named pools;
  Named (*token)();
  std::vector<std::string> flushed_with;  ///< arguments of a token that a flush takes too
};

Layer mamba2(at::ScalarType states) {
  constexpr std::int64_t H = 4, G = 2, P = 3, N = 5;
  return {"selective_state_ring_update",
          "selective_state_update",
          "selective_state_ring_flush",
          {{"state", normal({kSlots, H, P, N}, states)},
           {"ring_x", unwritten({kSlots, H, kWindow, P}, at::kBFloat16)},
           {"ring_B", unwritten({kSlots, G, kWindow, N}, at::kBFloat16)},
           {"ring_dt", unwritten({kSlots, H, kWindow}, at::kFloat)}},
          [] {
            return Named{{"x", normal({kRows, H, P})},
                         {"dt", normal({kRows, H})},
                         {"A", -at::arange(1, H + 1).to(at::kFloat) / H},
                         {"B", normal({kRows, G, N})},
                         {"C", normal({kRows, G, N})},
                         {"z", normal({kRows, H, P})},
                         {"dt_softplus", true}};
          },
          {"A"}};
}
Layer delta_rule(at::ScalarType states) {
  constexpr std::int64_t H = 2, HV = 4, K = 5, V = 3;
  return {"gated_delta_rule_ring_update",
          "gated_delta_rule_update",
          "gated_delta_rule_ring_flush",
          {{"state", normal({kSlots, HV, V, K}, states)},
           {"ring_k", unwritten({kSlots, H, kWindow, K}, at::kBFloat16)},
           {"ring_k_scale", unwritten({kSlots, H, kWindow}, at::kFloat)},
           {"ring_u", unwritten({kSlots, HV, kWindow, V}, states)},
           {"ring_g", unwritten({kSlots, HV, kWindow}, at::kFloat)}},
          [] {
            return Named{{"q", normal({kRows, H, K})},    {"k", normal({kRows, H, K})},
                         {"v", normal({kRows, HV, V})},   {"g", -at::rand({kRows, HV})},
                         {"beta", at::rand({kRows, HV})}, {"use_qk_l2norm", true}};
          },
          {}};
}

struct Rows {
  Tensor slots = ints({4, 0, 2}), cursors = ints({0, 0, 0}), positions = ints({0, 5, 23});
  void advance() {
    cursors = at::minimum(cursors + 1, (positions + 1) % kWindow);
    positions = positions + 1;
  }
};

/// The arguments of a step.
Named step(const Layer& layer, const Named& token, const Named& pools, const Rows& rows) {
  Named all = token;
  all.insert(pools.begin(), pools.end());
  all["state_indices"] = rows.slots;
  all["cursors"] = rows.cursors.clone();
  all["positions"] = rows.positions.clone();
  EXPECT_EQ(layer.pools.size(), pools.size());
  return all;
}

class ReplayRingsTorch : public testing::TestWithParam<Layer (*)(at::ScalarType)> {};
INSTANTIATE_TEST_SUITE_P(Recurrences, ReplayRingsTorch, testing::Values(mamba2, delta_rule));

TEST_P(ReplayRingsTorch, outputsAreThoseOfAStateAtEachToken) {
  at::manual_seed(1);
  const Layer layer = GetParam()(at::kFloat);
  Rows rows;
  const Tensor plain = layer.pools.at("state").toTensor().clone();
  for (int t = 0; t < 20; ++t, rows.advance()) {
    const Named token = layer.token();
    Named snapshot = token;
    snapshot["state"] = plain;
    snapshot["state_indices"] = rows.slots;
    const Tensor expected = call(layer.snapshots, snapshot).at(0).toTensor();
    const Tensor out =
        checked_call(layer.operation, step(layer, token, layer.pools, rows)).at(0).toTensor();
    EXPECT_TRUE(at::allclose(out.to(at::kFloat), expected.to(at::kFloat), 1e-2, 1e-3)) << t;
  }
  Named flush = layer.pools;
  for (const std::string& name : layer.flushed_with) flush[name] = layer.token().at(name);
  flush["state_indices"] = flush["targets"] = rows.slots;
  flush["counts"] = rows.cursors;
  call(layer.flush, flush);
  EXPECT_TRUE(at::allclose(layer.pools.at("state").toTensor(), plain, 1e-4, 1e-5));
}

// A request is forked in the middle of a window: the slot's state and ring are copied with the
// cursor, and the copy goes on as the first would have, bit by bit.
TEST_P(ReplayRingsTorch, aCopyInTheMiddleOfAWindowContinuesLikeTheOriginal) {
  at::manual_seed(2);
  for (const at::ScalarType states : {at::kFloat, at::kBFloat16}) {
    const Layer layer = GetParam()(states);
    Rows rows;
    for (int t = 0; t < 5; ++t, rows.advance())
      call(layer.operation, step(layer, layer.token(), layer.pools, rows));
    for (const auto& [name, pool] : layer.pools)
      call("state_copy", {{"state", pool.toTensor().unsqueeze(0)},
                          {"source", rows.slots},
                          {"target", ints({1, 3, 5})}});
    Rows copies = rows;
    copies.slots = ints({1, 3, 5});
    for (int t = 5; t < 20; ++t, rows.advance(), copies.advance()) {
      const Named token = layer.token();
      const auto a = call(layer.operation, step(layer, token, layer.pools, rows));
      const auto b = call(layer.operation, step(layer, token, layer.pools, copies));
      EXPECT_EQ(bytes_of(a.at(0).toTensor()), bytes_of(b.at(0).toTensor())) << t;
    }
    const Tensor state = layer.pools.at("state").toTensor();
    for (const auto& [from, to] : {std::pair{4, 1}, {0, 3}, {2, 5}})
      EXPECT_EQ(bytes_of(state[from]), bytes_of(state[to]));
  }
}

TEST_P(ReplayRingsTorch, badCursorsAndRingsAreRefusedByName) {
  const Layer layer = GetParam()(at::kFloat);
  const Rows rows;
  const Named good = step(layer, layer.token(), layer.pools, rows);
  EXPECT_EQ(complaint_of(layer.operation, good), "");
  const auto complaint = [&](const std::string& name, const Tensor& tensor) {
    Named bad = good;
    bad[name] = tensor;
    return complaint_of(layer.operation, bad);
  };
  const auto says = [](const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
  };
  EXPECT_TRUE(says(complaint("cursors", ints({0, 6, 0})), "cursors is expected to be at least 0"));
  EXPECT_TRUE(says(complaint("cursors", ints({-1, 0, 0})), "cursors is expected to be at least 0"));
  EXPECT_TRUE(
      says(complaint("positions", ints({-1, 0, 0})), "positions is expected to be at least"));
  EXPECT_TRUE(says(complaint("cursors", ints({0, 0})), "cursors is expected to be [N]"));
  EXPECT_TRUE(
      says(complaint("cursors", rows.cursors.to(at::kLong)), "cursors is expected to be Int"));
  EXPECT_TRUE(says(complaint("state_indices", ints({1, 1, 2})), "state_indices"));
  for (const auto& [name, pool] : layer.pools)
    if (name != "state") {
      EXPECT_TRUE(says(complaint(name, pool.toTensor().narrow(2, 0, 0)), name)) << name;
      EXPECT_TRUE(says(complaint(name, pool.toTensor().to(at::kDouble)), name)) << name;
    }
}

}  // namespace
}  // namespace lockstep::of_replay_rings
