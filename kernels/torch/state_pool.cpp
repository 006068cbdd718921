// torch.ops.lockstep.state_copy, state_zero and state_scatter_accepted: schemas in
// kernels/torch/operators.md.
#include <set>

#include "kernels/torch/operator.hpp"
#include "reference/recurrent/speculative_commit.hpp"

#ifdef LOCKSTEP_HAS_CUDA
#include "kernels/recurrent/state_copy.hpp"
#endif

namespace lockstep::torch_ops {
namespace {

constexpr std::int64_t kMovesOfLaunch = 12800;  ///< each takes 16 bytes of shared memory

/// Refuses a slot that two of the rows for which `writes` holds would write: which of the two stays
/// would depend on their order.
void expect_different_slots(const IndexView& slots, const char* name, const auto& writes) {
  std::set<std::int32_t> named;
  for (std::int64_t i = 0; i < slots.extent(0); ++i)
    expect(slots(i) < 0 || !writes(i) || named.insert(slots(i)).second, name, "of different slots",
           slots(i));
}

struct StateCopy : Arguments {
  static constexpr const char* kSchema =
      "state_copy(Tensor(a!) state, Tensor source, Tensor target) -> ()";

  using Arguments::Arguments;
  const Tensor state = tensor(), source = tensor(), target = tensor();

  void meta() const {}

  void cpu() const {
    expect_pool(state);
    expect_shape(target, "target", "[moves], as source", source.sizes());
    const IndexView from = host_slots(source, "source", state.size(1));
    const IndexView to = host_slots(target, "target", state.size(1));
    expect_different_slots(to, "target", [](std::int64_t) { return true; });
    with_states_as_rows(state, "state",
                        [&](const auto& pool) { reference::copy_states(pool, from, to); });
  }

#ifdef LOCKSTEP_HAS_CUDA
  void cuda() const {
    expect_pool(state);
    if (source.numel() > kMovesOfLaunch) return copy_through_memory();
    kernels::state_copy(pool_of(state, "state"), indices_of<1>(source, "source"),
                        indices_of<1>(target, "target"), stream());
  }

  /// Gathers what moves, layer by layer, and stores it afterwards: a launch of state_copy() keeps
  /// what moves in shared memory.
  void copy_through_memory() const {
    indices_of<1>(source, "source");
    expect_shape(target, "target", "[moves], as source", source.sizes());
    const Tensor moves = source.ge(0).logical_and(source.lt(state.size(1)));
    const Tensor from = source.where(moves, at::zeros_like(source)), one = at::ones_like(source);
    const Tensor to = target.masked_fill(moves.logical_not(), -1);
    for (std::int64_t layer = 0; layer < state.size(0); ++layer) {
      const Tensor pool = state.narrow(0, layer, 1);
      const Tensor moved = pool.select(0, 0).index_select(0, from).unsqueeze(1);
      for (std::int64_t first = 0; first < to.size(0); first += kRowsOfLaunch) {
        const auto part = [&](const Tensor& tensor) {
          return tensor.narrow(0, first, std::min(kRowsOfLaunch, to.size(0) - first));
        };
        kernels::state_scatter_accepted(pool_of(pool, "state"), pool_of(part(moved), "state"),
                                        indices_of<1>(part(to), "target"),
                                        indices_of<1>(part(one), "target"), stream());
      }
    }
  }
#endif
};

struct StateZero : Arguments {
  static constexpr const char* kSchema = "state_zero(Tensor(a!) state, Tensor slots) -> ()";

  using Arguments::Arguments;
  const Tensor state = tensor(), slots = tensor();

  std::int64_t batch_rows() const { return rows_in({}, slots); }

  void meta() const {}

  void check() const { expect_pool(state); }

  void cpu() const {
    check();
    const IndexView named = host_slots(slots, "slots", state.size(1));
    with_states_as_rows(state, "state",
                        [&](const auto& pool) { reference::zero_states(pool, named); });
  }

#ifdef LOCKSTEP_HAS_CUDA
  void cuda() const {
    check();
    kernels::state_zero(pool_of(state, "state"), indices_of<1>(slots, "slots"), stream());
  }
#endif
};

struct StateScatterAccepted : Arguments {
  static constexpr const char* kSchema = R"(
state_scatter_accepted(Tensor(a!) state, Tensor intermediate, Tensor slots,
    Tensor num_accepted_tokens) -> ())";

  using Arguments::Arguments;
  const Tensor state = tensor(), intermediate = tensor(), slots = tensor();
  const Tensor num_accepted_tokens = tensor();

  std::int64_t batch_rows() const { return rows_in({}, slots); }

  void meta() const {}

  void check() const {
    TORCH_CHECK(state.dim() >= 2, "state is expected to be [slots, ...]; got ", state.sizes());
    expect_type(intermediate, state.scalar_type(), "intermediate");
    TORCH_CHECK(intermediate.dim() == state.dim() + 1 &&
                    intermediate.sizes().slice(2) == state.sizes().slice(1),
                "intermediate is expected to be [B, T, ...] of states ", state.sizes().slice(1),
                "; got ", intermediate.sizes());
    expect_shape(slots, "slots", "[B]", {intermediate.size(0)});
    expect_shape(num_accepted_tokens, "num_accepted_tokens", "[B]", {intermediate.size(0)});
  }

  void cpu() const {
    check();
    const std::int64_t B = intermediate.size(0), T = intermediate.size(1);
    const IndexView to = host_slots(slots, "slots", state.size(0));
    const IndexView accepted = indices_of<1>(num_accepted_tokens, "num_accepted_tokens");
    for (std::int64_t b = 0; b < B; ++b)
      expect(accepted(b) <= T, "num_accepted_tokens", "at most T = " + std::to_string(T),
             accepted(b));
    expect_different_slots(to, "slots", [&](std::int64_t b) { return accepted(b) > 0; });
    with_states_as_rows(state.unsqueeze(0), "state", [&](const auto& states) {
      with_states_as_rows(intermediate, "intermediate", [&](const auto& snapshots) {
        if constexpr (std::is_same_v<decltype(states), decltype(snapshots)>)
          reference::scatter_accepted(at(states, 0), snapshots, to, accepted);
      });
    });
  }

#ifdef LOCKSTEP_HAS_CUDA
  void cuda() const {
    check();
    kernels::state_scatter_accepted(
        pool_of(state.unsqueeze(0), "state"), pool_of(intermediate, "intermediate"),
        indices_of<1>(slots, "slots"), indices_of<1>(num_accepted_tokens, "num_accepted_tokens"),
        stream());
  }
#endif
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(lockstep, m) {
  add_operator<StateCopy>(m);
  add_operator<StateZero>(m);
  add_operator<StateScatterAccepted>(m);
}

}  // namespace lockstep::torch_ops
