// Plugs in a cache or a server that is written in C++: this file reads the lines that Lockstep
// writes (cache_sim/check/protocol.md), and writes the answers. It needs C++17 and nothing else of
// Lockstep.
//
//     #include "cache_sim/check/subject_child.hpp"
//
//     int main() {
//       MyCache cache;
//       return lockstep::child::serve("levels=request again=1", [&](const auto& line) {
//         if (line.verb() == "hello") cache = MyCache(line.number("kv_tokens"));
//         if (line.verb() == "admit")
//           return "cached=" + std::to_string(cache.admit(line.tokens()));
//         …
//         return std::string("ok");
//       });
//     }
//
// fixtures/subjects/block_cache.cpp is a complete example. Verbs, fields and answers:
// cache_sim/trace/grammar.md.
#pragma once

#include <algorithm>
#include <cstdint>
#include <exception>
#include <functional>
#include <iostream>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

namespace lockstep::child {

/// A token as a number. An explicit id is that number, below 2^32; tokens of documents are above.
using Token = std::uint64_t;
using Tokens = std::vector<Token>;

/// The answer to an operation that the server never does.
inline const std::string kUnsupported = "unsupported";

/// One line: a verb and fields `key=value`.
class Line {
 public:
  /// `documents` numbers the names of documents in order of their first appearance.
  Line(const std::string& text, std::map<std::string, Token>& documents) : documents_(&documents) {
    for (std::size_t at = 0; at < text.size();) {
      const std::size_t end = std::min(text.find(' ', at), text.size());
      const std::string word = text.substr(at, end - at);
      const std::size_t equals = word.find('=');
      if (at == 0)
        verb_ = word;
      else if (equals != std::string::npos)
        fields_[word.substr(0, equals)] = word.substr(equals + 1);
      at = end + 1;
    }
  }

  const std::string& verb() const { return verb_; }
  bool has(const std::string& field) const { return fields_.count(field) != 0; }

  /// The text of a field; empty where the line does not have the field.
  std::string text(const std::string& field) const {
    const auto found = fields_.find(field);
    return found == fields_.end() ? "" : found->second;
  }

  std::int64_t number(const std::string& field, std::int64_t missing = 0) const {
    if (!has(field)) return missing;
    try {
      return std::stoll(text(field));
    } catch (const std::logic_error&) {
      throw std::invalid_argument("field " + field + "=" + text(field) + " is no number");
    }
  }

  /// `a2+b8:10+[7]` is tokens 0 and 1 of document a, 8 and 9 of document b, and the id 7.
  Tokens tokens(const std::string& field = "tokens") const {
    Tokens all;
    const std::string terms = text(field);
    for (std::size_t at = 0; at < terms.size();) {
      const std::size_t end = std::min(terms.find('+', at), terms.size());
      add_term(terms.substr(at, end - at), all);
      at = end + 1;
    }
    return all;
  }

  /// The text of tokens that tokens() of some line has returned, for state_tokens=, conv_tokens=
  /// and cached_tokens= of an answer.
  std::string spelled(const Tokens& all) const {
    std::map<Token, std::string> names;
    for (const auto& [name, document] : *documents_) names[document] = name;
    std::string terms;
    for (std::size_t at = 0, end; at < all.size(); at = end) {
      const Token document = all[at] >> 32;
      for (end = at + 1; end < all.size() && all[end] == all[at] + (end - at); ++end) continue;
      if (!terms.empty()) terms += '+';
      if (document == 0) {
        terms += '[' + std::to_string(all[at]) + ']';
        end = at + 1;
      } else {
        const Token first = all[at] & 0xFFFFFFFF;
        terms +=
            names.at(document) + std::to_string(first) + ':' + std::to_string(first + (end - at));
      }
    }
    return terms.empty() ? "[]" : terms;
  }

 private:
  void add_term(const std::string& term, Tokens& all) const {
    if (term.front() == '[') {
      for (std::size_t at = 1; at + 1 < term.size(); at = term.find_first_of(",]", at) + 1)
        all.push_back(std::stoull(term.substr(at)));
      return;
    }
    const std::size_t digits = term.find_first_of("0123456789"), colon = term.find(':');
    const Token document =
        documents_->emplace(term.substr(0, digits), documents_->size() + 1).first->second;
    const bool is_slice = colon != std::string::npos;
    const Token end = std::stoull(term.substr(is_slice ? colon + 1 : digits));
    for (Token i = is_slice ? std::stoull(term.substr(digits)) : 0; i < end; ++i)
      all.push_back(document << 32 | i);
  }

  std::map<std::string, Token>* documents_;
  std::string verb_;
  std::map<std::string, std::string> fields_;
};

/// Answers every line until Lockstep closes the pipe, and returns 0, the exit status for main().
/// `greeting` is the answer to `hello`. `answer` is called for `hello` as well: a new trace begins,
/// and the cache must forget everything. The text of an exception is reported as the death of the
/// subject. Standard output is the pipe, so text that is printed to std::cout meanwhile goes to
/// standard error; text of printf() would not.
inline int serve(const std::string& greeting,
                 const std::function<std::string(const Line& line)>& answer) {
  std::map<std::string, Token> documents;
  std::ostream pipe(std::cout.rdbuf(std::cerr.rdbuf()));
  for (std::string text; std::getline(std::cin, text);) {
    if (text.compare(0, 6, "hello ") == 0) documents.clear();
    std::string reply;
    try {
      const Line line(text, documents);
      reply = answer(line);
      if (line.verb() == "hello") reply = greeting;
    } catch (const std::exception& error) {
      reply = std::string("raised=") + error.what();
    } catch (...) {
      reply = "raised=what is no std::exception";
    }
    std::replace(reply.begin(), reply.end(), '\n', ' ');  // an answer is one line
    pipe << reply << std::endl;  // flushed, because Lockstep waits for the line
  }
  std::cout.rdbuf(pipe.rdbuf());
  return 0;
}

}  // namespace lockstep::child
