// Subject: the interface of everything that answers operations. A run treats an oracle of
// reference/, a policy of cache_sim/ and a child process alike.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "reference/base/finding.hpp"
#include "reference/base/registry.hpp"
#include "reference/base/result.hpp"
#include "reference/protocol/capability.hpp"
#include "reference/protocol/config.hpp"
#include "reference/protocol/defect.hpp"
#include "reference/protocol/layer_state.hpp"
#include "reference/protocol/operation.hpp"

namespace lockstep {

class LabelState;
namespace cache_sim {
class NumberedBlocks;
struct BlockGroups;
}  // namespace cache_sim

/// Checks the invariants of a subject's inner structures; it shares none of the subject's
/// decisions.
class Auditor {
 public:
  virtual ~Auditor() = default;
  /// Checks, after an operation, everything that the operation touched.
  virtual void after(const Operation& operation, const Reply& reply, Findings& findings) = 0;
  /// Recounts and checks everything from scratch.
  virtual void recompute(Findings& findings) = 0;
};

/// The content of a cache as a tree, for pictures.
struct SnapshotNode {
  int parent = -1;   ///< index into `nodes`, -1 for the root
  std::string edge;  ///< the edge's tokens, in the grammar's terms
  std::int64_t depth = 0;
  bool has_state = false;
  bool locked = false;
  std::string path{};           ///< the tokens from the root, as findings name the node
  std::int64_t state_slot = 0;  ///< 0: none, or not one of numbered slots
  bool has_host_state = false;
};
/// The host tier of a cache, the copies that were queued so far, and those of them in flight.
struct SnapshotHost {
  struct Copied {
    std::int64_t kv_tokens = 0, states = 0;
  };
  struct InFlight {
    std::uint64_t id;  ///< of one copy alone
    bool to_host;      ///< otherwise to the device
    Copied what;
  };
  std::int64_t kv_total = 0, states_total = 0;
  Copied to_host, to_device;
  std::vector<InFlight> in_flight{};  ///< queued, and not landed
};
struct Snapshot {
  std::vector<SnapshotNode> nodes;  ///< parents before children
  std::int64_t kv_free = 0, kv_total = 0;
  std::int64_t states_free = 0, states_total = 0;
  std::optional<SnapshotHost> host{};  ///< none: there is no such tier
};

class Subject {
 public:
  virtual ~Subject() = default;

  /// Does the operation and answers. A refusal is an ordinary reply. An error is either bad input
  /// (an operation on a request that is not there) or, with `finding` set, the failure of the
  /// subject itself.
  virtual Result<Reply> apply(const Operation& operation) = 0;

  /// Findings that the subject itself has reported since the last call.
  virtual Findings take_findings() { return {}; }

  /// Details of the last operation's decision, such as block numbers by group; empty where the
  /// subject tells none.
  virtual std::string decided() const { return {}; }

  /// The cache's content now; nullopt where the subject does not show it.
  virtual std::optional<Snapshot> snapshot() const { return std::nullopt; }
};

struct SubjectOptions {
  Config config;
  LayerState* layers =
      nullptr;  ///< never null; a LayerState that does nothing where nothing is checked
  const Defect* defect = nullptr;  ///< the one rule to break
  /// Of a policy whose memory is blocks: the numbers in them; null: there are none.
  cache_sim::NumberedBlocks* blocks = nullptr;
};

/// A cache policy, the real structure (cache_sim/).
struct PolicyEntry {
  std::string_view name;
  std::string_view summary;
  bool has_states;
  ConfigFields config_fields;  ///< the fields it honours besides the common ones
  std::unique_ptr<Subject> (*make)(const SubjectOptions&);
  /// False where a lock on a node without a state is not counted, so that a state which fills the
  /// node loses another holder's lock: a search unlocks such a node at once.
  bool counts_locks_on_tombstones = true;
  /// Checks a configuration beyond the range of each field; null: nothing to check. The error is a
  /// sentence that names the field.
  Result<void> (*check)(const Config&) = nullptr;
  /// The slots that the policy will name: state slots 1 … states, and KV slots below kv_end. Null:
  /// they follow from state_slots and kv_tokens.
  struct SlotCounts {
    std::int64_t states, kv_end;
    bool index_keys = false;  ///< a KV slot has an index key, too, which a sparse attention reads
  };
  SlotCounts (*slots)(const Config&) = nullptr;
  SlotCounts slots_in(const Config& config) const {
    if (slots != nullptr) return slots(config);
    return {has_states ? config.state_slots : 0, config.kv_tokens + config.page};
  }
  Capabilities capabilities;  ///< beside Capability::request; its oracle has the same
  bool is_default = false;    ///< true of one policy: see default_policy()
  /// Its forwards are told by LayerState::forward() or BlockMemory::forward(), so that its slots or
  /// blocks may hold numbers.
  bool tells_forwards = false;
  /// Whether the rows of a configuration have rings (ForwardRow::ring). Null: never.
  bool (*has_rings)(const Config&) = nullptr;
  /// The groups of layers that take blocks from its one pool. Null: it has slots. The error is a
  /// sentence that names the field: its rows are not told in this configuration.
  Result<cache_sim::BlockGroups> (*groups)(const Config&) = nullptr;
  /// The numbers of layers that keep KV and that keep states, where each layer has slots of its
  /// own. Null: a slot has the same number in all layers of whatever model.
  struct LayerCounts {
    std::int64_t kv, states;
  };
  LayerCounts (*layers)(const Config&) = nullptr;
};

/// The policy that answers where neither --subject nor a file names one.
std::string_view default_policy();

/// An auditor of a family of policies.
struct AuditorEntry {
  std::string_view name;
  /// An auditor over the subject, which must outlive it; null where the subject is of another
  /// family. `labels` may be null: then states are not compared with their prefixes.
  std::unique_ptr<Auditor> (*make)(Subject& subject, const LabelState* labels);
};

/// The oracle of a policy, by the policy's name (reference/).
struct OracleEntry {
  std::string_view name;
  std::unique_ptr<Subject> (*make)(const SubjectOptions&);
};

}  // namespace lockstep
