// torch.ops.lockstep.gated_delta_rule_update, gated_delta_rule_replay and gated_delta_rule_prefill:
// schemas in kernels/torch/operators.md.
#include "reference/recurrent/gated_delta_rule.hpp"
#include "kernels/torch/operator.hpp"
#include "kernels/torch/prefill_arguments.hpp"

#ifdef LOCKSTEP_HAS_CUDA
#include "kernels/recurrent/gated_delta_rule_prefill.hpp"
#include "kernels/recurrent/gated_delta_rule_update.hpp"
#endif

namespace lockstep::torch_ops {
namespace {

/// Tokens of a gated delta rule, and A_log and dt_bias, which turn the raw a and b into gates.
struct GatedDeltaArguments {
  MaybeTensor q;  ///< absent in a replay, which never reads q: k is passed in its place
  Tensor k, v, g, beta;
  MaybeTensor query_start_loc;
  MaybeTensor A_log, dt_bias;
  bool fold = false;  ///< the arguments' names begin with fold_

  const char* name(const char* plain, const char* folded) const { return fold ? folded : plain; }
  const char* k_name() const { return name("k", "fold_k"); }
  const char* v_name() const { return name("v", "fold_v"); }
  const char* g_name() const { return name("g", "fold_g"); }
  const char* beta_name() const { return name("beta", "fold_beta"); }
  const char* starts_name() const { return name("query_start_loc", "fold_query_start_loc"); }

  void check(const Tensor& state) const {
    expect_states(state, "[slots, HV, V, K]");
    expect_float(state, "state");
    expect_rank(k, k_name(), 3);
    expect_float(k, k_name());
    const std::int64_t T = k.size(0), H = k.size(1);
    const std::int64_t HV = state.size(1), V = state.size(2), K = state.size(3);
    expect(H > 0 && HV % H == 0, "state", "[slots, HV, V, K] with HV a multiple of H",
           state.sizes());
    expect_shape(k, k_name(), "[T, H, K]", {T, H, K});
    expect_shape(q, "q", "[T, H, K]", {T, H, K});
    expect_shape(v, v_name(), "[T, HV, V]", {T, HV, V});
    expect_shape(g, g_name(), "[T, HV]", {T, HV});
    expect_shape(beta, beta_name(), "[T, HV]", {T, HV});
    expect_type(q, k.scalar_type(), "q");
    expect_type(v, k.scalar_type(), v_name());
    expect_float(g, g_name());
    expect_float(beta, beta_name());
    expect_contiguous_rows(q, "q");
    expect_contiguous_rows(k, k_name());
    expect_contiguous_rows(v, v_name());
    if (A_log) expect_float(*A_log, "A_log");
    if (dt_bias) expect_float(*dt_bias, "dt_bias");
    expect_together(A_log, dt_bias, "A_log and dt_bias");
    expect_shape(A_log, "A_log", "[HV]", {HV});
    expect_shape(dt_bias, "dt_bias", "[HV]", {HV});
  }

#ifdef LOCKSTEP_HAS_CUDA
  template <class T>
  kernels::GatedDeltaTokens<T> on_device() const {
    return {.q = view_of<const T, 3>(q ? *q : k, "q"),
            .k = view_of<const T, 3>(k, k_name()),
            .v = view_of<const T, 3>(v, v_name()),
            .g = mixed<2>(g, g_name()),
            .beta = mixed<2>(beta, beta_name()),
            .query_start_loc = indices_of(query_start_loc, starts_name())};
  }
#endif
};

/// The same arguments in float, as the reference takes them.
class HostGatedDelta {
 public:
  HostGatedDelta(const GatedDeltaArguments& x, const Tensor& state)
      : q_(x.q ? *x.q : x.k, "q"),
        k_(x.k, x.k_name()),
        v_(x.v, x.v_name()),
        g_(x.g, x.g_name()),
        beta_(x.beta, x.beta_name()) {
    in = {.q = q_.in(), .k = k_.in(), .v = v_.in(), .g = g_.in(), .beta = beta_.in()};
    in.rows.tokens = x.k.size(0);
    in.rows.query_start_loc = indices_of(x.query_start_loc, x.starts_name());
    in.rows.storage = storage_of(x.v, state);
    if (!x.A_log) return;
    const HostTensor<1> A_log(x.A_log, "A_log"), dt_bias(x.dt_bias, "dt_bias");
    gates_ = reference::gated_delta_gates<float>(g_.in(), beta_.in(), A_log.in(), dt_bias.in());
    in.g = gates_.g;
    in.beta = gates_.beta;
  }
  HostGatedDelta(const HostGatedDelta&) = delete;  // `in` has views of the members
  HostGatedDelta& operator=(const HostGatedDelta&) = delete;
  ~HostGatedDelta() = default;

  reference::GatedDeltaRuleInputs<float> in{};

 private:
  HostTensor<3> q_, k_, v_;
  HostTensor<2> g_, beta_;
  reference::GatedDeltaGates<float> gates_;
};

struct GatedDeltaRuleUpdate : Arguments {
  static constexpr const char* kSchema = R"(
gated_delta_rule_update(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) state, *,
    float? scale=None, Tensor? A_log=None, Tensor? dt_bias=None, Tensor? query_start_loc=None,
    Tensor? state_indices=None, Tensor? state_out_indices=None, Tensor? num_accepted_tokens=None,
    bool use_qk_l2norm=False, int pad_slot_id=-1, Tensor? parents=None,
    Tensor(b!)? snapshots=None, bool read_only=False, Tensor? fold_k=None, Tensor? fold_v=None,
    Tensor? fold_g=None, Tensor? fold_beta=None, Tensor? fold_query_start_loc=None,
    Tensor? fold_num_accepted_tokens=None) -> Tensor)";

  using Arguments::Arguments;
  const Tensor q = tensor(), k = tensor(), v = tensor(), g = tensor(), beta = tensor();
  const Tensor state = tensor();
  const MaybeNumber scale = maybe_number();
  const MaybeTensor A_log = maybe_tensor(), dt_bias = maybe_tensor();
  const MaybeTensor query_start_loc = maybe_tensor();
  const MaybeTensor state_indices = maybe_tensor(), state_out_indices = maybe_tensor();
  const MaybeTensor num_accepted_tokens = maybe_tensor();
  const bool use_qk_l2norm = flag();
  const std::int64_t pad_slot_id = integer();
  const MaybeTensor parents = maybe_tensor(), snapshots = maybe_tensor();
  const bool read_only = flag();
  const MaybeTensor fold_k = maybe_tensor(), fold_v = maybe_tensor(), fold_g = maybe_tensor();
  const MaybeTensor fold_beta = maybe_tensor(), fold_query_start_loc = maybe_tensor();
  const MaybeTensor fold_num_accepted_tokens = maybe_tensor();

  StateSlots slots() const {
    return slots_of(state_indices, state_out_indices, num_accepted_tokens, pad_slot_id);
  }
  std::int64_t batch_rows() const { return rows_in(query_start_loc, k); }
  GatedDeltaArguments tokens() const { return {q, k, v, g, beta, query_start_loc, A_log, dt_bias}; }
  /// The tokens of an earlier verification, whose accepted ones are committed first.
  std::optional<GatedDeltaArguments> fold() const {
    const bool any = fold_k || fold_v || fold_g || fold_beta || fold_num_accepted_tokens;
    expect(any == (fold_k && fold_v && fold_g && fold_beta && fold_num_accepted_tokens),
           "fold_k, fold_v, fold_g, fold_beta and fold_num_accepted_tokens",
           "all given, or none of them", "some of them");
    expect(any || !fold_query_start_loc, "fold_query_start_loc", "absent without a fold", "given");
    if (!any) return {};
    return GatedDeltaArguments{{},    *fold_k, *fold_v, *fold_g, *fold_beta, fold_query_start_loc,
                               A_log, dt_bias, true};
  }

  Tensor meta() const { return like(v); }

  /// Checks the arguments for both devices, without reading values of indices.
  void check() const {
    tokens().check(state);
    const std::int64_t T = k.size(0);
    check_recurrence_rows(query_start_loc, slots(), T);
    expect_type(snapshots, state.scalar_type(), "snapshots");
    expect_shape(snapshots, "snapshots", "[T, HV, V, K]",
                 {T, state.size(1), state.size(2), state.size(3)});
    expect_type(parents, at::kInt, "parents");
    expect_shape(parents, "parents", "[T]", {T});
    if (const auto earlier = fold()) check_fold(*earlier);
  }
  void check_fold(const GatedDeltaArguments& earlier) const {
    earlier.check(state);
    expect_type(earlier.k, k.scalar_type(), "fold_k");
    expect(!slots().table, "state_indices", "[N] with a fold", "a table");
    const std::int64_t N = row_count(indices_of(query_start_loc, "query_start_loc"), k.size(0));
    const std::int64_t folded =
        row_count(indices_of(fold_query_start_loc, "fold_query_start_loc"), earlier.k.size(0));
    expect(folded == N, "fold_query_start_loc", "of as many rows as the step, " + std::to_string(N),
           folded);
    expect_type(fold_num_accepted_tokens, at::kInt, "fold_num_accepted_tokens");
    expect_shape(fold_num_accepted_tokens, "fold_num_accepted_tokens", "[N]", {N});
  }

  Tensor cpu() const {
    check();
    const bool reads_only = read_only || parents || snapshots || fold_k;
    const HostTensor<4> hstate(state, "state"),
        shots(reads_only && !parents && !snapshots ? scratch_snapshots(state, k.size(0))
                                                   : snapshots);
    const HostTensor<3> out = host_output<3>(v);
    HostGatedDelta host(tokens(), state);
    host.in.use_qk_l2norm = use_qk_l2norm;
    host.in.scale = as_float(scale);
    host.in.rows.slots = slots();
    check_host_slots(host.in.rows, state.size(0), reads_only);
    if (const auto earlier = fold()) commit(*earlier, host.in, hstate);
    reference::gated_delta_rule_update<float>(host.in, hstate.out(), out.out(),
                                              indices_of(parents, "parents"), shots.maybe_out());
    if (!reads_only || fold_k) hstate.write_back();
    if (snapshots) shots.write_back();
    return out.as(v.scalar_type());
  }

  void commit(const GatedDeltaArguments& earlier,
              const reference::GatedDeltaRuleInputs<float>& step,
              const HostTensor<4>& hstate) const {
    HostGatedDelta host(earlier, state);
    host.in.use_qk_l2norm = use_qk_l2norm;
    host.in.rows.slots = step.rows.slots;
    check_host_slots(host.in.rows, state.size(0), false);
    reference::gated_delta_rule_replay<float>(
        host.in, indices_of<1>(*fold_num_accepted_tokens, "fold_num_accepted_tokens"),
        hstate.out());
  }

#ifdef LOCKSTEP_HAS_CUDA
  Tensor cuda() const {
    check();
    const Tensor out = result_like(v);
    const auto earlier = fold();
    with_types(k, state, [&]<class T, class S>(TypeOf<T>, TypeOf<S>) {
      kernels::GatedDeltaRuleUpdate<T, S> in{
          .tokens = tokens().template on_device<T>(),
          .state = view_of<S, 4>(state, "state"),
          .out = view_of<T, 3>(out, "out"),
          .slots = slots(),
          .A_log = mixed<1>(A_log, "A_log"),
          .dt_bias = mixed<1>(dt_bias, "dt_bias"),
          .scale = as_float(scale),
          .use_qk_l2norm = use_qk_l2norm,
          .snapshots = maybe_view<S, 4>(snapshots, state.scalar_type(), "snapshots"),
          .parents = indices_of(parents, "parents"),
          .read_only = read_only,
          .fold_accepted = indices_of(fold_num_accepted_tokens, "fold_num_accepted_tokens")};
      if (earlier) in.fold = earlier->template on_device<T>();
      kernels::gated_delta_rule_update<T, S>(in, stream());
    });
    if (ran_in_general_kernel()) {
      TORCH_WARN_ONCE(
          "gated_delta_rule_update ran in its general kernel, which can take ten times as long as ",
          "the others. They take K of 96 or 128 (with LOCKSTEP_ALL_SHAPES 64, 256), V a ",
          "multiple of 8, and rows of states, q and k at multiples of 16 bytes; got a state of ",
          state.sizes());
    }
    return out;
  }
#endif
};

struct GatedDeltaRuleReplay : Arguments {
  static constexpr const char* kSchema = R"(
gated_delta_rule_replay(Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) state,
    Tensor num_accepted_tokens, *, Tensor? A_log=None, Tensor? dt_bias=None,
    Tensor? query_start_loc=None, Tensor? state_indices=None, Tensor? nodes=None,
    bool use_qk_l2norm=False, int pad_slot_id=-1) -> ())";

  using Arguments::Arguments;
  const Tensor k = tensor(), v = tensor(), g = tensor(), beta = tensor(), state = tensor();
  const Tensor num_accepted_tokens = tensor();
  const MaybeTensor A_log = maybe_tensor(), dt_bias = maybe_tensor();
  const MaybeTensor query_start_loc = maybe_tensor(), state_indices = maybe_tensor();
  const MaybeTensor nodes = maybe_tensor();
  const bool use_qk_l2norm = flag();
  const std::int64_t pad_slot_id = integer();

  StateSlots slots() const { return slots_of(state_indices, {}, {}, pad_slot_id); }
  std::int64_t batch_rows() const { return rows_in(query_start_loc, k); }
  GatedDeltaArguments tokens() const {
    return {{}, k, v, g, beta, query_start_loc, A_log, dt_bias};
  }

  void meta() const {}

  void check() const {
    tokens().check(state);
    check_replay(query_start_loc, slots(), k.size(0), num_accepted_tokens, nodes);
  }

  void cpu() const {
    check();
    const HostTensor<4> hstate(state, "state");
    HostGatedDelta host(tokens(), state);
    host.in.use_qk_l2norm = use_qk_l2norm;
    host.in.rows.slots = slots();
    check_host_slots(host.in.rows, state.size(0), false);
    reference::gated_delta_rule_replay<float>(
        host.in, indices_of<1>(num_accepted_tokens, "num_accepted_tokens"), hstate.out(),
        indices_of<2>(nodes, "nodes"));
    hstate.write_back();
  }

#ifdef LOCKSTEP_HAS_CUDA
  void cuda() const {
    check();
    with_types(k, state, [&]<class T, class S>(TypeOf<T>, TypeOf<S>) {
      kernels::gated_delta_rule_replay<T, S>(
          {.tokens = tokens().template on_device<T>(),
           .state = view_of<S, 4>(state, "state"),
           .slots = slots(),
           .A_log = mixed<1>(A_log, "A_log"),
           .dt_bias = mixed<1>(dt_bias, "dt_bias"),
           .use_qk_l2norm = use_qk_l2norm},
          indices_of<1>(num_accepted_tokens, "num_accepted_tokens"), indices_of<2>(nodes, "nodes"),
          stream());
    });
  }
#endif
};

struct GatedDeltaRulePrefill : Arguments {
  static constexpr const char* kSchema = R"(
gated_delta_rule_prefill(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!)? state, *,
    float? scale=None, Tensor? A_log=None, Tensor? dt_bias=None, Tensor? query_start_loc=None,
    Tensor? state_indices=None, Tensor? has_initial_state=None, Tensor(b!)? boundary_states=None,
    int boundary_every=0, bool use_qk_l2norm=False, int pad_slot_id=-1,
    bool whole_rows=False) -> Tensor)";

  using Arguments::Arguments;
  const Tensor q = tensor(), k = tensor(), v = tensor(), g = tensor(), beta = tensor();
  const MaybeTensor state = maybe_tensor();
  const MaybeNumber scale = maybe_number();
  const MaybeTensor A_log = maybe_tensor(), dt_bias = maybe_tensor();
  const MaybeTensor query_start_loc = maybe_tensor(), state_indices = maybe_tensor();
  const MaybeTensor has_initial_state = maybe_tensor(), boundary_states = maybe_tensor();
  const std::int64_t boundary_every = integer();
  const bool use_qk_l2norm = flag();
  const std::int64_t pad_slot_id = integer();
  const bool whole_rows = flag();

  PrefillArguments rows() const {
    return {false, query_start_loc, {}, state_indices, has_initial_state, pad_slot_id};
  }
  std::int64_t batch_rows() const { return rows_in(query_start_loc, {}); }
  /// A tensor with the shape and type of states: the state or boundary_states; nothing if neither
  /// is given.
  MaybeTensor states() const { return state ? state : boundary_states; }
  GatedDeltaArguments tokens() const { return {q, k, v, g, beta, query_start_loc, A_log, dt_bias}; }

  Tensor meta() const { return like(v); }

  void check() const {
    expect_rank(v, "v", 3);
    expect_rank(k, "k", 3);
    const Tensor shape = states() ? *states()
                                  : at::empty({0, v.size(1), v.size(2), k.size(2)},
                                              at::TensorOptions().dtype(at::kFloat));
    tokens().check(shape);
    rows().check(k, "k", 3, state.has_value());
    expect(!boundary_states || boundary_every > 0, "boundary_every", "a count of tokens",
           boundary_every);
    check_boundary_rows(boundary_states, batch_rows());
    if (!state || !boundary_states) return;
    expect_type(boundary_states, state->scalar_type(), "boundary_states");
    expect_rank(*boundary_states, "boundary_states", 4);
    expect_shape(*boundary_states, "boundary_states", "[boundaries, HV, V, K]",
                 {boundary_states->size(0), v.size(1), v.size(2), k.size(2)});
  }

  Tensor cpu() const {
    check();
    rows().check_host(k, state);
    rows().check_boundaries(boundary_states, boundary_every, k.size(0));
    const HostTensor<4> hstate(state, "state"), boundary(boundary_states, "boundary_states");
    const HostTensor<3> out = host_output<3>(v);
    HostGatedDelta host(tokens(), states() ? *states() : v);
    host.in.use_qk_l2norm = use_qk_l2norm;
    host.in.scale = as_float(scale);
    host.in.rows.slots = rows().slots();
    host.in.rows.has_initial_state = rows().resumes();
    std::optional<BoundaryStates<float>> at_boundaries;
    if (boundary_states) at_boundaries = {.states = boundary.out(), .every = boundary_every};
    reference::gated_delta_rule_scan<float>(host.in, hstate.maybe_out(), out.out(), at_boundaries);
    if (state) hstate.write_back();
    if (boundary_states) boundary.write_back();
    return out.as(v.scalar_type());
  }

#ifdef LOCKSTEP_HAS_CUDA
  Tensor cuda() const {
    check();
    const Tensor out = result_like(v);
    const Tensor pool = states() ? *states() : at::empty({0}, v.options().dtype(at::kFloat));
    with_types(k, pool, [&]<class T, class S>(TypeOf<T>, TypeOf<S>) {
      kernels::GatedDeltaRulePrefill<T, S> in{
          .tokens = tokens().template on_device<T>(),
          .state = maybe_view<S, 4>(state, pool.scalar_type(), "state"),
          .out = view_of<T, 3>(out, "out"),
          .slots = rows().slots(),
          .has_initial_state = rows().resumes(),
          .A_log = mixed<1>(A_log, "A_log"),
          .dt_bias = mixed<1>(dt_bias, "dt_bias"),
          .scale = as_float(scale),
          .use_qk_l2norm = use_qk_l2norm,
          .boundary_states =
              maybe_view<S, 4>(boundary_states, pool.scalar_type(), "boundary_states"),
          .boundary_every = boundary_every,
          .form = whole_rows ? kernels::PrefillForm::whole_rows : kernels::PrefillForm::automatic};
      // The counters at the beginning of the workspace must be 0 before a call.
      const kernels::PrefillWorkspace sizes = kernels::prefill_workspace(in);
      Tensor workspace;
      if (sizes.bytes > 0) {
        workspace = at::empty({sizes.bytes}, v.options().dtype(at::kByte));
        workspace.narrow(0, 0, sizes.zeros).zero_();
        in.workspace = view_of<unsigned char, 1>(workspace, "workspace");
      }
      kernels::gated_delta_rule_prefill<T, S>(in, stream());
    });
    return out;
  }
#endif
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(lockstep, m) {
  add_operator<GatedDeltaRuleUpdate>(m);
  add_operator<GatedDeltaRuleReplay>(m);
  add_operator<GatedDeltaRulePrefill>(m);
}

}  // namespace lockstep::torch_ops
