#include "cache_sim/search/branch_names.hpp"

#include <utility>

namespace lockstep::cache_sim {
namespace {

/// The tree of all sequences. A node stands for the prefix that ends with it.
class Namer {
 public:
  using Node = std::size_t;
  using Path = std::vector<Node>;  // of a sequence: the node of each token

  BranchNames name(Steps steps) {
    for (Step& step : steps) {
      if (auto* const operation = std::get_if<Operation>(&step.statement.what)) name(*operation);
      if (auto* const spec = std::get_if<RequestSpec>(&step.statement.what)) name(*spec);
    }
    return {std::move(steps), std::move(begins_after_)};
  }

 private:
  static constexpr Node kRoot = 0;

  static Node end_of(const Path& path) { return path.empty() ? kRoot : path.back(); }

  Node child(Node node, Token token) {
    const auto [known, is_new] = children_.try_emplace({node, token}, names_.size());
    if (!is_new) return known->second;
    const bool goes_on = node != kRoot && !has_children_[node];
    has_children_[node] = true;
    has_children_.push_back(false);
    if (!goes_on) begins_after_.emplace(++documents_, names_[node]);
    names_.push_back(goes_on ? names_[node] + 1 : token_of(documents_, 0));
    return known->second;
  }

  /// Renames tokens that continue the path, and appends their nodes to it.
  void follow(Path& path, Tokens& tokens) {
    std::vector<Token> values = tokens.values();
    for (Token& token : values) {
      path.push_back(child(end_of(path), token));
      token = names_[path.back()];
    }
    if (!values.empty()) tokens = Tokens::of_values(values);
  }

  /// Renames drafts: a chain after the path, or a tree in which each follows its parent.
  void name_drafts(Node before, Operation& extend) {
    std::vector<Token> values = extend.drafts.values();
    Path nodes{before};
    for (std::size_t i = 0; i < values.size(); ++i) {
      const auto parent =
          i < extend.parents.size() ? static_cast<std::size_t>(extend.parents[i]) : i;
      nodes.push_back(child(parent < nodes.size() ? nodes[parent] : before, values[i]));
      values[i] = names_[nodes.back()];
    }
    if (!values.empty()) extend.drafts = Tokens::of_values(values);
  }

  static Path cut(Path path, std::int64_t length) {
    if (length >= 0 && length < std::ssize(path)) path.resize(static_cast<std::size_t>(length));
    return path;
  }

  void name(Operation& operation) {
    Path& request = requests_[operation.id.index()];
    Path from_root;
    switch (operation.verb) {
      case Verb::admit: request.clear(); [[fallthrough]];
      case Verb::accept: follow(request, operation.tokens); return;
      case Verb::extend:
        follow(request, operation.tokens);
        name_drafts(end_of(request), operation);
        return;
      case Verb::clone: requests_[operation.as.index()] = cut(request, operation.up_to); return;
      case Verb::truncate: request = cut(request, operation.up_to); return;
      case Verb::capture: captured_[operation.as.index()] = cut(request, operation.up_to); return;
      case Verb::restore: request = captured_[operation.from.index()]; return;
      case Verb::alloc: {
        Path& slot = slots_[operation.as.index()];
        slot.clear();
        follow(slot, operation.tokens);
        return;
      }
      case Verb::fork: slots_[operation.as.index()] = slots_[operation.slot.index()]; return;
      case Verb::copy: slots_[operation.to.index()] = slots_[operation.from.index()]; return;
      case Verb::advance: follow(slots_[operation.slot.index()], operation.tokens); return;
      default: follow(from_root, operation.tokens); return;
    }
  }

  /// The tokens of an output that is given as a length occur in no other line, so they keep their
  /// names.
  void name(RequestSpec& spec) {
    Path path;
    Tokens named = spec.stops ? spec.tokens : spec.tokens.prefix(spec.prompt_size);
    const Tokens output = spec.tokens.slice(named.size(), spec.tokens.size());
    follow(path, named);
    spec.tokens = named.followed_by(output);
  }

  std::map<std::pair<Node, Token>, Node> children_;
  std::vector<Token> names_{0};
  std::vector<bool> has_children_{false};
  Document documents_ = 0;
  std::map<Document, Token> begins_after_;
  std::map<std::uint32_t, Path> requests_, slots_, captured_;  // by Name::index()
};

}  // namespace

BranchNames named_by_branch(Steps steps) {
  return Namer().name(std::move(steps));
}

}  // namespace lockstep::cache_sim
