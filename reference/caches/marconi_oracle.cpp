// Marconi (Pan et al. 2025, MLSys): the subject that follows its rules (marconi.md) literally.
// Numbers in brackets are rules of that page.
#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <set>

#include "reference/base/counted.hpp"
#include "reference/base/require.hpp"
#include "reference/protocol/subject.hpp"

namespace lockstep::reference {
namespace {

constexpr std::int64_t kEverything = std::numeric_limits<std::int64_t>::max();

/// The paper's model of 7 billion weights: layers, width and state size.
constexpr double kAttentionLayers = 4, kSsmLayers = 24, kMlpLayers = 28, kWidth = 4096,
                 kStateSize = 128;
constexpr std::int64_t kTokenBytes = 65'536;
constexpr std::int64_t kStateBytes = 26'787'840;

/// F(L) = L (a + b L).
struct Flops {
  double a, b;
  double of(std::int64_t tokens) const {
    const auto L = static_cast<double>(tokens);
    return L * (a + b * L);
  }
};

struct Rules {
  std::int64_t capacity, token_bytes, state_bytes;
  Flops flops, parent_flops;
  bool is_artifact;
};

Rules rules_of(const Config& config, bool is_artifact) {
  Rules rules{};
  rules.is_artifact = is_artifact;
  rules.token_bytes =
      config.number("token_bytes") != 0 ? config.number("token_bytes") : kTokenBytes;
  rules.state_bytes =
      config.number("state_bytes") != 0 ? config.number("state_bytes") : kStateBytes;
  rules.capacity = config.pool_bytes != 0 ? config.pool_bytes
                                          : config.kv_tokens * rules.token_bytes +
                                                config.state_slots * rules.state_bytes;
  const double d = kWidth;
  const double attention = 8 * d * d, pairs = 4 * d, mlp = 16 * d * d;
  const double ssm = 12 * d * d + 16 * d * kStateSize + 10 * d;
  rules.flops = {kAttentionLayers * attention + kMlpLayers * mlp + kSsmLayers * ssm,
                 kAttentionLayers * pairs};
  if (config.number("flops_token") != 0 || config.number("flops_pair") != 0) {
    const double pair = static_cast<double>(config.number("flops_pair")) / 2;
    rules.flops = {static_cast<double>(config.number("flops_token")) + pair, pair};
  }
  rules.parent_flops = rules.flops;
  if (is_artifact)
    rules.parent_flops = {rules.flops.a - kMlpLayers * mlp + kMlpLayers * attention,
                          rules.flops.b + kMlpLayers * pairs};
  return rules;
}

/// Tokens in a namespace.
struct Path {
  std::string salt;
  std::vector<Token> tokens;
  auto operator<=>(const Path&) const = default;

  std::int64_t size() const { return static_cast<std::int64_t>(tokens.size()); }
  Path first(std::int64_t size) const { return {salt, {tokens.begin(), tokens.begin() + size}}; }
  std::int64_t shared(const Path& other) const {
    if (salt != other.salt) return 0;
    const auto [end, unused] = std::ranges::mismatch(tokens, other.tokens);
    return end - tokens.begin();
  }
  bool begins_with(const Path& other) const {
    return salt == other.salt && shared(other) == other.size();
  }
};

struct Evicted {
  std::int64_t kv = 0, states = 0;
};

/// Rules 2 to 6.
class MarconiCache {
 public:
  explicit MarconiCache(const Rules& rules) : rules_(rules) {}

  struct Match {
    std::int64_t full, prefix;
  };
  Match match(const Path& path) {
    ++clock_;
    const std::int64_t prefix = longest_with_state(path);
    if (prefix > 0) nodes_.at(path.first(prefix)).time = clock_;
    return {shared(path), prefix};
  }

  /// Stores the prefix with a state. True where it has one already.
  bool insert(const Path& path) {
    ++clock_;
    if (rules_.is_artifact)
      if (const std::int64_t used = longest_with_state(path); used > 0)
        nodes_.at(path.first(used)).time = clock_;
    part(path, shared(path));
    Node& end = nodes_[path];
    const bool exist = end.has_state;
    end = {true, clock_};
    tidy_up();
    return exist;
  }

  void lock(const Path& path) { locks_.insert(path); }
  void unlock(const Path& path) { locks_.erase(locks_.find(path)); }

  /// Evicts one node. False where there is no candidate.
  bool evict_one(double alpha, Evicted& evicted) {
    std::vector<Candidate> all;
    for (const auto& [path, node] : nodes_)
      if (node.has_state && !is_locked(path) && child_count(path) <= 1)
        all.push_back(candidate(path, node));
    if (all.empty()) return false;
    const auto normalised = [&](double Candidate::*value) {
      double low = all.front().*value, high = low;
      for (const Candidate& one : all) {
        low = std::min(low, one.*value);
        high = std::max(high, one.*value);
      }
      for (Candidate& one : all) one.*value = high == low ? 0 : (one.*value - low) / (high - low);
    };
    normalised(&Candidate::recency);
    normalised(&Candidate::efficiency);
    for (Candidate& one : all) one.score = one.recency + alpha * one.efficiency;
    const Candidate& worst =
        *std::ranges::min_element(all, [](const Candidate& x, const Candidate& y) {
          return std::tuple(x.score, x.time, x.path.size()) <
                 std::tuple(y.score, y.time, y.path.size());
        });
    const std::int64_t before = kv_tokens();
    nodes_.at(worst.path).has_state = false;
    tidy_up();
    evicted.kv += before - kv_tokens();
    ++evicted.states;
    return true;
  }

  std::int64_t bytes() const {
    return kv_tokens() * rules_.token_bytes + state_count() * rules_.state_bytes;
  }
  std::int64_t bytes_in_use() const {
    return locked_tokens() * rules_.token_bytes + locked_states() * rules_.state_bytes;
  }
  std::int64_t locked_tokens() const {
    std::int64_t sum = 0;
    for (const auto& [path, node] : nodes_)
      if (is_locked(path)) sum += path.size() - parent_size(path);
    return sum;
  }
  std::int64_t locked_states() const {
    return std::ranges::count_if(nodes_, [&](const auto& entry) {
      return entry.second.has_state && is_locked(entry.first);
    });
  }
  void forget_locks() { locks_.clear(); }

 private:
  struct Node {
    bool has_state = false;
    std::int64_t time = 0;
  };
  struct Candidate {
    Path path;
    std::int64_t time;
    double recency, efficiency, score = 0;
  };

  Candidate candidate(const Path& path, const Node& node) const {
    const std::int64_t parent = parent_size(path);
    const double saved = rules_.flops.of(path.size()) - rules_.parent_flops.of(parent);
    const std::int64_t tokens = rules_.is_artifact ? path.size() : path.size() - parent;
    const std::int64_t bytes = tokens * rules_.token_bytes + rules_.state_bytes;
    return {path, node.time, 1.0 / static_cast<double>(clock_ + 1 - node.time),
            saved / static_cast<double>(bytes)};
  }

  /// The stored prefix that shares most with the path stands next to it in order.
  std::int64_t shared(const Path& path) const {
    const auto behind = nodes_.lower_bound(path);
    std::int64_t most = 0;
    if (behind != nodes_.end()) most = path.shared(behind->first);
    if (behind != nodes_.begin()) most = std::max(most, path.shared(std::prev(behind)->first));
    return most;
  }
  std::int64_t longest_with_state(const Path& path) const {
    std::int64_t longest = 0;
    for (const auto& [other, node] : nodes_)
      if (node.has_state && path.begins_with(other)) longest = std::max(longest, other.size());
    return longest;
  }
  /// A prefix stands before the path in order, and of two the longer one is nearer to it.
  std::int64_t parent_size(const Path& path) const {
    for (auto at = nodes_.lower_bound(path); at != nodes_.begin();)
      if (path.begins_with((--at)->first)) return at->first.size();
    return 0;
  }
  /// All that begins with the path stands right behind it.
  std::int64_t child_count(const Path& path) const {
    std::int64_t count = 0;
    for (auto at = nodes_.upper_bound(path); at != nodes_.end() && at->first.begins_with(path);
         ++at)
      count += parent_size(at->first) == path.size() ? 1 : 0;
    return count;
  }
  bool is_locked(const Path& path) const {
    return std::ranges::any_of(locks_, [&](const Path& lock) { return lock.begins_with(path); });
  }
  std::int64_t kv_tokens() const {
    std::int64_t sum = 0;
    for (const auto& [path, node] : nodes_) sum += path.size() - parent_size(path);
    return sum;
  }
  std::int64_t state_count() const {
    return std::ranges::count_if(nodes_, [](const auto& entry) { return entry.second.has_state; });
  }

  /// A node where the path leaves an edge, or ends inside one.
  void part(const Path& path, std::int64_t at) {
    const Path upper = path.first(at);
    if (at == 0 || nodes_.contains(upper)) return;
    for (const auto& [other, node] : nodes_)  // the shortest that goes on after it
      if (other.begins_with(upper) && parent_size(other) < at) {
        const std::int64_t time = node.time;
        nodes_[upper] = {false, time};
        return;
      }
  }

  /// Rule 2.
  void tidy_up() {
    const auto is_none = [&](const auto& entry) {
      return !entry.second.has_state && child_count(entry.first) < 2;
    };
    for (auto none = std::ranges::find_if(nodes_, is_none); none != nodes_.end();
         none = std::ranges::find_if(nodes_, is_none))
      nodes_.erase(none);
  }

  Rules rules_;
  std::map<Path, Node> nodes_;
  std::multiset<Path> locks_;
  std::int64_t clock_ = 0;
};

class MarconiOracle final : public Subject {
 public:
  MarconiOracle(const Config& config, bool is_artifact)
      : config_(config), rules_(rules_of(config, is_artifact)), cache_(rules_) {
    if (config.text("alpha") != "tuned") alpha_ = std::stod(config.text("alpha")) / 1000;
  }

  Result<Reply> apply(const Operation& operation) override {
    switch (operation.verb) {
      case Verb::admit: return admit(operation);
      case Verb::step: return Reply{};
      case Verb::evict:
        if (operation.room != Operation::kAbsent) return fail("evict: there is no room= here");
        return evict(std::max<std::int64_t>(operation.kv, 0),
                     std::max<std::int64_t>(operation.state, 0));
      case Verb::flush: return evict(kEverything, kEverything);
      case Verb::check: return check();
      case Verb::extend:
      case Verb::accept:
      case Verb::checkpoint:
      case Verb::finish:
      case Verb::abort:
      case Verb::preempt: break;
      default: return fail(fmt::format("{}: not a verb of this cache", to_string(operation.verb)));
    }
    const auto found = requests_.find(operation.id.text());
    if (found == requests_.end())
      return fail(fmt::format("there is no request {}", operation.id.text()));
    Request& request = found->second;
    switch (operation.verb) {
      case Verb::accept: return accept(request, operation);
      case Verb::abort:
      case Verb::preempt: forget(found); return Reply{};
      case Verb::finish:
        if (operation.insert) break;
        forget(found);
        return Reply{};
      default: break;
    }
    if (!request.drafts.empty()) return fail("a verification was not accepted yet");
    switch (operation.verb) {
      case Verb::extend: return extend(request, operation);
      case Verb::checkpoint:
        if (operation.up_to > request.computed) return fail("checkpoint: not computed yet");
        return Reply().set(ReplyField::exist, 0).set(ReplyField::length, request.used);
      default: return finish(found);
    }
  }

 private:
  struct Request {
    Path known;
    std::int64_t admitted = 0;  ///< tokens known at the admission
    std::int64_t computed = 0;
    std::int64_t used = 0;      ///< tokens whose KV is the cache's: this prefix is locked
    std::int64_t branch = 0;    ///< the position to store a state at; 0: none
    std::int64_t verified = 0;  ///< tokens of a verification that was not accepted yet
    std::vector<Token> drafts;
  };
  struct Served {
    Path prompt, stored;
  };

  std::int64_t free_bytes() const {
    std::int64_t used = cache_.bytes();
    for (const auto& [id, request] : requests_)
      used += (request.computed + request.verified - request.used) * rules_.token_bytes +
              rules_.state_bytes;
    return rules_.capacity - used;
  }
  bool would_fit(std::int64_t bytes) const {
    return bytes <= free_bytes() + cache_.bytes() - cache_.bytes_in_use();
  }
  bool evict_one(Evicted& evicted) {
    std::optional<MarconiCache> before;
    if (!before_pressure_ && config_.text("alpha") == "tuned") before = cache_;
    if (!cache_.evict_one(alpha_, evicted)) return false;
    if (before) {
      before_pressure_ = before;
      window_ = std::max<std::int64_t>(
          1, config_.number("bootstrap") * std::max<std::int64_t>(1, finished_));
    }
    return true;
  }
  /// Evicts until so many bytes are free; evicts nothing where that is not possible.
  bool make_room(std::int64_t bytes, Evicted& evicted) {
    if (!would_fit(bytes)) return false;
    while (free_bytes() < bytes) require(evict_one(evicted), "what would fit can be made to fit");
    return true;
  }

  Result<Reply> admit(const Operation& operation) {
    const std::string& id = operation.id.text();
    if (requests_.contains(id)) return fail(fmt::format("there is a request {} already", id));
    const std::int64_t size = operation.tokens.size();
    if (size == 0 || operation.prompt > size || operation.external > 0 ||
        operation.room != Operation::kAbsent)
      return fail("admit: no tokens, a prompt longer than they are, or external ones");
    if (size * rules_.token_bytes + rules_.state_bytes > rules_.capacity)
      return Reply::refusal(Refusal::too_long);
    if (static_cast<std::int64_t>(requests_.size()) == config_.rows())
      return Reply::refusal(Refusal::no_row);
    Request request;
    request.known = {operation.salt.text(), operation.tokens.values()};
    request.admitted = size;
    const auto [full, prefix] = cache_.match(request.known.first(size - 1));
    request.computed = request.used = prefix;
    request.branch = full > prefix ? full : 0;
    const Path used = request.known.first(prefix);
    cache_.lock(used);
    const std::int64_t rest = (size - prefix) * rules_.token_bytes;
    const bool fits_state = would_fit(rules_.state_bytes);
    if (!fits_state || !would_fit(rules_.state_bytes + rest)) {
      cache_.unlock(used);
      return Reply::refusal(fits_state ? Refusal::no_kv : Refusal::no_state_slot);
    }
    Evicted evicted;
    make_room(rules_.state_bytes, evicted);
    requests_.emplace(id, request);
    return Reply()
        .set(ReplyField::cached, prefix)
        .set(ReplyField::state, prefix)
        .set(ReplyField::conv, prefix)
        .set(ReplyField::junction, request.branch)
        .set(ReplyField::evicted_kv, evicted.kv)
        .set(ReplyField::evicted_states, evicted.states);
  }

  Result<Reply> extend(Request& request, const Operation& operation) {
    if (operation.async) return fail("extend: this cache does not run ahead of results");
    const std::vector<Token> drafts = operation.drafts.values();
    const std::vector<Token> more = operation.tokens.values();
    const std::int64_t left =
        request.known.size() + std::ssize(more) + std::ssize(drafts) - request.computed;
    if (operation.n < 1 || operation.n > left || (!drafts.empty() && operation.n != left))
      return fail(fmt::format("extend: {} of {}", operation.n, counted(left, "token")));
    Evicted evicted;
    if (!make_room(operation.n * rules_.token_bytes, evicted))
      return Reply::refusal(Refusal::no_kv);
    request.known.tokens.insert(request.known.tokens.end(), more.begin(), more.end());
    if (drafts.empty()) {
      const bool passes_branch =
          request.computed < request.branch && request.branch <= request.computed + operation.n;
      request.computed += operation.n;
      if (passes_branch && make_room(rules_.state_bytes, evicted)) {
        cache_.insert(request.known.first(request.branch));
        use(request, request.branch);
      }
    } else {
      request.drafts = drafts;
      request.verified = operation.n;
    }
    return Reply()
        .set(ReplyField::n, operation.n)
        .set(ReplyField::evicted_kv, evicted.kv)
        .set(ReplyField::evicted_states, evicted.states);
  }

  Result<Reply> accept(Request& request, const Operation& operation) {
    const std::vector<Token> tokens = operation.tokens.values();
    if (operation.n != std::ssize(tokens)) return fail("accept: n is not the number of tokens");
    const std::vector<Token>& drafts = request.drafts;
    const bool verifies = !drafts.empty();
    if (verifies && (tokens.empty() || tokens.size() > drafts.size() + 1 ||
                     !std::equal(tokens.begin(), tokens.end() - 1, drafts.begin())))
      return fail("accept: the tokens kept are drafts and one more");
    request.known.tokens.insert(request.known.tokens.end(), tokens.begin(), tokens.end());
    if (verifies) request.computed = request.known.size() - 1;
    request.verified = 0;
    request.drafts.clear();
    return Reply().set(ReplyField::n, operation.n);
  }

  void use(Request& request, std::int64_t size) {
    cache_.unlock(request.known.first(request.used));
    cache_.lock(request.known.first(size));
    request.used = size;
  }

  Result<Reply> finish(std::map<std::string, Request>::iterator found) {
    const Request& request = found->second;
    const Path stored = request.known.first(request.computed);
    const bool exist = stored.size() == 0 || cache_.insert(stored);
    const Served served{request.known.first(request.admitted), stored};
    forget(found);
    ++finished_;
    if (window_ > 0) {
      served_.push_back(served);
      if (std::ssize(served_) == window_) tune();
    }
    return Reply().set(ReplyField::exist, exist ? 1 : 0).set(ReplyField::length, stored.size());
  }

  void forget(std::map<std::string, Request>::iterator found) {
    cache_.unlock(found->second.known.first(found->second.used));
    requests_.erase(found);
  }

  /// Rule 7.
  void tune() {
    double most = -1;
    for (int tenths = 0; tenths <= 20; ++tenths) {
      const double alpha = tenths * 100 / 1000.0;
      const double saved = saved_with(alpha);
      if (saved <= most) continue;
      most = saved;
      alpha_ = alpha;
    }
    window_ = 0;
    served_.clear();
  }

  double saved_with(double alpha) const {
    MarconiCache cache = *before_pressure_;
    cache.forget_locks();
    double saved = 0;
    const auto make_room = [&](std::int64_t bytes) {
      if (bytes > rules_.capacity - cache.bytes_in_use()) return false;
      Evicted unused;
      while (bytes > rules_.capacity - cache.bytes())
        require(cache.evict_one(alpha, unused), "what would fit can be made to fit");
      return true;
    };
    for (const auto& [prompt, stored] : served_) {
      const auto [full, prefix] = cache.match(prompt.first(prompt.size() - 1));
      saved += rules_.flops.of(prefix);
      Path used = prompt.first(prefix);
      cache.lock(used);
      if (full > prefix && full <= stored.size() && make_room(rules_.state_bytes)) {
        cache.insert(prompt.first(full));
        cache.unlock(used);
        used = prompt.first(full);
        cache.lock(used);
      }
      const std::int64_t more = stored.size() - used.size();
      // The stored tokens may lie within this replay's hit: then a state alone is added.
      const std::int64_t tokens = std::max<std::int64_t>(more, 0);
      const std::int64_t bytes = more == 0 ? 0 : tokens * rules_.token_bytes + rules_.state_bytes;
      if (stored.size() > 0 && make_room(bytes)) cache.insert(stored);
      cache.unlock(used);
    }
    return saved;
  }

  Reply evict(std::int64_t kv, std::int64_t states) {
    Evicted evicted;
    while ((evicted.kv < kv || evicted.states < states) && evict_one(evicted)) {
    }
    return Reply().set(ReplyField::kv, evicted.kv).set(ReplyField::state, evicted.states);
  }

  Reply check() const {
    return Reply()
        .set(ReplyField::kv_free, free_bytes() / rules_.token_bytes)
        .set(ReplyField::states_free, free_bytes() / rules_.state_bytes)
        .set(ReplyField::kv_locked, cache_.locked_tokens())
        .set(ReplyField::states_locked, cache_.locked_states());
  }

  const Config config_;
  const Rules rules_;
  MarconiCache cache_;
  std::map<std::string, Request> requests_;
  double alpha_ = 0;
  std::int64_t finished_ = 0;
  std::optional<MarconiCache> before_pressure_;  ///< none before the first eviction
  std::int64_t window_ = 0;                      ///< finishes to replay; 0: not tuning
  std::vector<Served> served_;
};

const Registration<OracleEntry> kMarconi{
    {"marconi", [](const SubjectOptions& options) -> std::unique_ptr<Subject> {
       return std::make_unique<MarconiOracle>(options.config, false);
     }}};
const Registration<OracleEntry> kArtifact{
    {"marconi-artifact", [](const SubjectOptions& options) -> std::unique_ptr<Subject> {
       return std::make_unique<MarconiOracle>(options.config, true);
     }}};

}  // namespace
}  // namespace lockstep::reference
