#!/usr/bin/env python3
"""Plants small mistakes in the headers of reference/, each behind a run-time switch, so that one build holds them all.

mutate_reference.py HEADER… --root DIR --out DIR --include DIR…
                                          writes the changed headers below --out, mutant_switch.hpp and mutants.json

What is planted: the other sign, a dropped term, a neighbouring comparison, a neighbouring integer, a doubled constant,
`and` for `or`, `min` for `max`, a flipped condition or flag, a deleted statement. Positions come from clang's syntax
tree, and what a sum of numbers or of Eigen's expressions becomes is decided by its type (mutant_switch.hpp). Left
alone: declarations, `require` (a check, not a rule), and what a compiler has to know.
"""
import argparse
import json
import pathlib
import re
import subprocess

COMPARISONS = {"<": ["<=", ">"], ">": [">=", "<"], "<=": ["<", ">"], ">=": [">", "<"], "==": ["!="], "!=": ["=="]}
NAMES = {"<": "less", ">": "greater", "<=": "at_most", ">=": "at_least", "==": "equal", "!=": "different"}
SUMS = {"+": "add", "-": "subtract", "*": "multiply", "/": "divide", "%": "remainder"}
UPDATES = {"+=": "add_to", "-=": "subtract_from", "*=": "multiply_by"}
HOW = {"add": ["minus", "without the second"], "subtract": ["plus", "without the second"],
       "multiply": ["other", "without the second"], "divide": ["times", "without the second"],
       "remainder": ["without the second"], "add_to": ["minus", "not at all"], "subtract_from": ["plus", "not at all"],
       "multiply_by": ["not at all"]}
KEPT = {"DeclStmt", "CompoundStmt", "NullStmt", "CaseStmt", "DefaultStmt", "BreakStmt", "CXXTryStmt", "SwitchStmt"}
FUNCTIONS = ("FunctionDecl", "CXXMethodDecl", "CXXConstructorDecl", "CXXConversionDecl")


def syntax_trees(header, include):
    command = ["clang++", "-std=c++20", "-x", "c++", "-fsyntax-only", "-w", "-Xclang", "-ast-dump=json",
               "-Xclang", "-ast-dump-filter=lockstep", str(header)]
    for folder in include:
        command += ["-isystem", str(folder)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    decoder, at = json.JSONDecoder(), 0
    while (at := text.find("{", at)) >= 0:
        tree, at = decoder.raw_decode(text, at)
        if "includedFrom" not in tree.get("loc", {}):
            yield tree


class Edit:
    """The new text of the bytes [begin, end). `render(text)` gets a function that renders bytes of the same file."""

    def __init__(self, begin, end, kinds, render):
        self.begin, self.end, self.kinds, self.render, self.numbers = begin, end, kinds, render, []


class Header:
    def __init__(self, path, name):
        self.name, self.bytes, self.edits = name, path.read_bytes(), {}

    def span(self, node):
        begin, end = node.get("range", {}).get("begin", {}), node.get("range", {}).get("end", {})
        if "offset" not in begin or "offset" not in end or "includedFrom" in begin:
            return None
        return begin["offset"], end["offset"] + end["tokLen"]

    def words(self, begin, end):
        return self.bytes[begin:end].decode()

    def source_line(self, offset):
        begin, end = self.bytes.rfind(b"\n", 0, offset) + 1, self.bytes.find(b"\n", offset)
        return self.words(begin, end).split(" //")[0].strip()

    def edit(self, span, kinds, render):
        self.edits.setdefault((*span, kinds[0]), Edit(*span, kinds, render))

    # --- Declarations -----------------------------------------------------------------------------

    def declaration(self, node):
        kind, inner = node.get("kind", ""), [c for c in node.get("inner", []) if c]
        if kind in ("FunctionTemplateDecl", "ClassTemplateDecl"):  # the pattern, not its instances
            patterns = [c for c in inner if c["kind"] in FUNCTIONS + ("CXXRecordDecl",)]
            inner = patterns[:1]
        elif kind in FUNCTIONS:
            bodies = [c for c in inner if c["kind"] == "CompoundStmt"]
            span = self.span(bodies[-1]) if bodies else None
            if span and self.bytes[span[0]:span[0] + 1] == b"{":
                self.block(bodies[-1], last=True)
            return
        elif kind == "FieldDecl":
            for child in inner:
                self.expression(child)
            return
        for child in inner:
            if child["kind"].endswith("Decl") and not child["kind"].endswith("SpecializationDecl"):
                self.declaration(child)

    # --- Statements -------------------------------------------------------------------------------

    def block(self, node, last=False):
        children = node.get("inner", [])
        for i, child in enumerate(children):
            self.statement(child, last and i + 1 == len(children))

    def statement(self, node, last=False, deletable=True):
        kind, span = node.get("kind", ""), self.span(node)
        if span is None or self.words(*span).startswith(("require(", "static_assert")):
            return
        if node.get("isConstexpr"):
            deletable = False
        if deletable and kind not in KEPT and not (kind == "ReturnStmt" and last):
            self.deletion(span)
        self.inside(node, kind, last)

    def deletion(self, span):
        begin, end = span
        behind = re.match(rb"\s*;", self.bytes[end:])
        end += behind.end() if behind else 0
        self.edit((begin, end), ["deleted"],
                  lambda text, n: f"{{ if (!::lockstep::mutants::on({n[0]})) {{ {text(begin, end)} }} }}")

    def inside(self, node, kind, last):
        children = [c for c in node.get("inner", []) if c]
        if kind == "CompoundStmt":
            self.block(node, last)
        elif kind == "IfStmt":
            if node.get("hasInit") or node.get("hasVar"):
                self.statement(children[0], deletable=False)
                children = children[1:]
            if not node.get("isConstexpr"):
                self.condition(children[0])
            for branch in children[1:]:  # to delete the only statement of an if is to delete the if
                self.statement(branch, last, deletable=bool(node.get("hasElse")))
        elif kind == "CXXForRangeStmt":
            for child in children[:-1]:
                if "range" in json.dumps(child)[:600] and child["kind"] == "DeclStmt":
                    self.expression(child)
            self.statement(children[-1], deletable=False)
        elif kind in ("ForStmt", "WhileStmt", "DoStmt"):
            for child in children[:-1]:
                self.expression(child)
            self.statement(children[-1], deletable=False)
        elif kind == "SwitchStmt":
            self.statement(children[-1])
        elif kind in ("CaseStmt", "DefaultStmt"):
            self.statement(children[-1], last=True)
        else:
            self.expression(node)

    def condition(self, node):
        """Flipped, unless it is a comparison or joins some: those have mutants of their own."""
        span = self.span(node)
        if span and not re.search(r"==|!=|<=|>=| < | > |&&|\|\|", self.words(*span)):
            self.edit(span, ["flipped"],
                      lambda text, n: f"::lockstep::mutants::flip({n[0]}, static_cast<bool>({text(*span)}))")
        self.expression(node)

    # --- Expressions ------------------------------------------------------------------------------

    def expression(self, node):
        kind, span = node.get("kind", ""), self.span(node)
        children = [c for c in node.get("inner", []) if c]
        if kind == "LambdaExpr":
            bodies = [c for c in children if c.get("kind") == "CompoundStmt"]
            if bodies:
                self.block(bodies[-1], last=True)
            return
        if (kind == "VarDecl" and node.get("constexpr")) or kind in ("StaticAssertDecl", "TypeAliasDecl"):
            return
        if span and kind == "CallExpr" and self.words(*span).startswith("require("):
            return
        if span:
            self.operation(node, kind, span, children)
        for child in children:
            self.expression(child)

    def operation(self, node, kind, span, children):
        if kind in ("BinaryOperator", "CompoundAssignOperator"):
            self.binary(span, children)
        elif kind == "CXXOperatorCallExpr":
            self.binary(span, children[1:])
        elif kind == "CXXRewrittenBinaryOperator":
            call = node
            while call.get("kind") != "CXXOperatorCallExpr" and call.get("inner"):
                call = call["inner"][0]
            self.binary(span, call.get("inner", [])[1:])
        elif kind == "UnaryOperator" and node.get("opcode") == "-":
            inside = self.span(children[0])
            self.edit(span, ["without the sign"],
                      lambda text, n: f"::lockstep::mutants::negative({n[0]}, {text(*inside)})")
        elif kind == "ConditionalOperator":
            self.condition(children[0])
        elif kind == "CallExpr" and (found := re.match(r"std::(min|max)\b", self.words(*span))):
            self.min_or_max(span, found)
        elif kind in ("IntegerLiteral", "FloatingLiteral", "CXXBoolLiteralExpr"):
            self.literal(kind, span)

    def binary(self, span, operands):
        spans = sorted(s for s in map(self.span, operands) if s)
        if len(spans) != 2:
            return
        (a, b), (c, d) = spans
        sign = self.words(b, c).strip()
        if sign in COMPARISONS:
            self.edit(span, COMPARISONS[sign], lambda text, n:
                      f"::lockstep::mutants::{NAMES[sign]}({', '.join(map(str, n))}, {text(a, b)}, {text(c, d)})")
        elif sign in SUMS or sign in UPDATES:
            name = SUMS.get(sign) or UPDATES[sign]
            self.edit(span, [f"{sign} {how}" for how in HOW[name]], lambda text, n:
                      f"::lockstep::mutants::{name}({', '.join(map(str, n))}, {text(a, b)}, {text(c, d)})")
        elif sign in ("&&", "||"):
            other = {"&&": "||", "||": "&&"}[sign]
            self.edit(span, [f"{sign} as {other}"], lambda text, n:
                      f"(::lockstep::mutants::on({n[0]}) ? ({text(a, b)}) {other} ({text(c, d)})"
                      f" : ({text(a, b)}) {sign} ({text(c, d)}))")

    def min_or_max(self, span, found):
        name = found.group(1)
        other, rest = {"min": "max", "max": "min"}[name], span[0] + found.end()
        self.edit(span, [f"{name} as {other}"], lambda text, n:
                  f"(::lockstep::mutants::on({n[0]}) ? std::{other}{text(rest, span[1])}"
                  f" : std::{name}{text(rest, span[1])})")

    def literal(self, kind, span):
        words, before = self.words(*span), self.words(max(0, span[0] - 30), span[0])
        if before.endswith(("<", "[")) or re.search(r"operator$|case $", before):
            return
        cast = re.search(r"\b(S|T)\{$", before)  # S{1}: a number that is not constant would be narrowed
        wanted = f"<{cast.group(1)}>" if cast else ""
        if kind == "CXXBoolLiteralExpr":
            self.edit(span, ["flipped"], lambda text, n: f"::lockstep::mutants::flip({n[0]}, {words})")
        elif kind == "FloatingLiteral":
            self.edit(span, ["doubled"], lambda text, n: f"::lockstep::mutants::doubled({n[0]}, {words})")
        elif words == "0":
            self.edit(span, ["0 as 1"], lambda text, n: f"::lockstep::mutants::integer{wanted}({n[0]}, -1, 0, 1)")
        elif re.fullmatch(r"\d+", words):
            below, above = int(words) - 1, int(words) + 1
            self.edit(span, [f"{words} as {below}", f"{words} as {above}"], lambda text, n:
                      f"::lockstep::mutants::integer{wanted}({n[0]}, {n[1]}, {words}, {below}, {above})")

    # --- The changed text -------------------------------------------------------------------------

    def text(self, begin, end, edits):
        pieces, at = [], begin
        edits = [e for e in edits if begin <= e.begin and e.end <= end]
        for edit in edits:
            if edit.begin < at:
                continue  # inside of one that was rendered
            inner = [e for e in edits if e is not edit and e not in pieces]
            inner = inner[inner.index(edits[edits.index(edit) + 1]):] if edits.index(edit) + 1 < len(edits) else []
            pieces.append(self.bytes[at:edit.begin].decode())
            pieces.append(edit.render(lambda b, e, inner=inner: self.text(b, e, inner), edit.numbers))
            at = edit.end
        return "".join(map(str, pieces)) + self.bytes[at:end].decode()

    def mutated(self, first):
        mutants = []
        rank = {"deleted": 0, "flipped": 1}
        order = sorted(self.edits.values(), key=lambda e: (e.begin, -e.end, rank.get(e.kinds[0], 2)))
        for edit in order:
            shown = " ".join(self.words(edit.begin, edit.end).split())
            for kind in edit.kinds:
                edit.numbers.append(first + len(mutants))
                mutants.append({"number": edit.numbers[-1], "file": self.name,
                                "line": self.bytes.count(b"\n", 0, edit.begin) + 1, "kind": kind,
                                "text": shown if len(shown) <= 90 else shown[:87] + "…",
                                "source": self.source_line(edit.begin)})
        text = self.text(0, len(self.bytes), order)
        text = re.sub(r"^(template <[^\n]*>\n)?constexpr (?=[\w:<>]+ \w+\()", r"\1inline ", text, flags=re.M)
        return text.replace("#pragma once\n", '#pragma once\n\n#include "mutant_switch.hpp"\n', 1), mutants


SWITCH = r"""// Which mutant is alive (LOCKSTEP_MUTANT), and what it does to values of any type.
// LOCKSTEP_REACHED=FILE writes the numbers of all mutants that a run came by.
#pragma once

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <type_traits>

namespace lockstep::mutants {

inline const int alive = std::getenv("LOCKSTEP_MUTANT") ? std::atoi(std::getenv("LOCKSTEP_MUTANT")) : 0;
struct Reached {
  static constexpr int kMost = 1 << 14;
  const char* const file = std::getenv("LOCKSTEP_REACHED");
  std::atomic<bool> seen[kMost]{};
  ~Reached() {
    if (!file) return;
    std::FILE* const out = std::fopen(file, "w");
    for (int i = 0; i < kMost; ++i)
      if (seen[i]) std::fprintf(out, "%d\n", i);
    std::fclose(out);
  }
};
inline Reached reached;
inline bool on(int n) {
  if (reached.file) reached.seen[n].store(true, std::memory_order_relaxed);
  return n == alive;
}
inline bool flip(int n, bool b) { return on(n) ? !b : b; }
inline double doubled(int n, double x) { return on(n) ? 2 * x : x; }
inline float doubled(int n, float x) { return on(n) ? 2 * x : x; }
template <class S = int>
S integer(int low, int high, S value, S below, S above) { return on(low) ? below : on(high) ? above : value; }
template <class S = int>
S integer(int n, int, S value, S other) { return on(n) ? other : value; }

template <class T>
concept Number = std::is_arithmetic_v<T>;
template <class T>
concept Expression = requires { typename T::PlainObject; };
template <class T>
using Plain = typename T::PlainObject;

template <class A, class B>
auto add(int minus, int without, const A& a, const B& b) {
  using R = decltype(a + b);
  if constexpr (Number<R>) return static_cast<R>(on(minus) ? a - b : on(without) ? static_cast<R>(a) : a + b);
  else if constexpr (Expression<R>) {
    if (on(minus)) return Plain<R>(a - b);
    if constexpr (Expression<A>) if (on(without)) return Plain<R>(a);
    return Plain<R>(a + b);
  } else if constexpr (std::is_convertible_v<A, R>) return on(without) ? R(a) : R(a + b);
  else return a + b;
}
template <class A, class B>
auto subtract(int plus, int without, const A& a, const B& b) {
  using R = decltype(a - b);
  if constexpr (Number<A> && Number<B>) return static_cast<R>(on(plus) ? a + b : on(without) ? static_cast<R>(a) : a - b);
  else if constexpr (Expression<R>) {
    if (on(plus)) return Plain<R>(a + b);
    if constexpr (Expression<A>) if (on(without)) return Plain<R>(a);
    return Plain<R>(a - b);
  } else return a - b;
}
template <class A, class B>
auto multiply(int other, int without, const A& a, const B& b) {
  using R = decltype(a * b);
  if constexpr (Number<R>) return static_cast<R>(on(other) ? a + b : on(without) ? static_cast<R>(a) : a * b);
  else if constexpr (Expression<R>) {
    if (on(other)) return Plain<R>(-(a * b));
    if constexpr (Number<A>) { if (on(without)) return Plain<R>(b); }
    if constexpr (Number<B>) { if (on(without)) return Plain<R>(a); }
    return Plain<R>(a * b);
  } else return a * b;
}
template <class A, class B>
auto divide(int times, int without, const A& a, const B& b) {
  using R = decltype(a / b);
  if constexpr (Number<R>) return static_cast<R>(on(times) ? a * b : on(without) ? static_cast<R>(a) : a / b);
  else {
    if (on(times)) return Plain<R>(a * b);
    return on(without) ? Plain<R>(a) : Plain<R>(a / b);
  }
}
template <class A, class B>
auto remainder(int without, const A& a, const B& b) { return on(without) ? a : a % b; }
template <class A>
auto negative(int n, const A& a) {
  if constexpr (Number<A>) return on(n) ? a : -a;
  else return on(n) ? Plain<A>(a) : Plain<A>(-a);
}
template <class A, class B>
auto& add_to(int minus, int no, A&& a, const B& b) {
  if (on(minus)) { if constexpr (requires { a -= b; }) a -= b; }
  else if (!on(no)) a += b;
  return static_cast<std::remove_reference_t<A>&>(a);
}
template <class A, class B>
auto& subtract_from(int plus, int no, A&& a, const B& b) {
  if (on(plus)) a += b;
  else if (!on(no)) a -= b;
  return static_cast<std::remove_reference_t<A>&>(a);
}
template <class A, class B>
auto& multiply_by(int no, A&& a, const B& b) {
  if (!on(no)) a *= b;
  return static_cast<std::remove_reference_t<A>&>(a);
}
COMPARISONS
}  // namespace lockstep::mutants
"""


def comparison(sign):
    others = COMPARISONS[sign]
    numbers = ", ".join(f"int n{i}" for i in range(len(others)))
    choices = " : ".join(f"on(n{i}) ? a {other} b" for i, other in enumerate(others))
    return (f"template <class A, class B>\nbool {NAMES[sign]}({numbers}, const A& a, const B& b) "
            f"{{ return {choices} : a {sign} b; }}\n")


def main():
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("headers", nargs="+")
    words.add_argument("--root", required=True, type=pathlib.Path)
    words.add_argument("--out", required=True, type=pathlib.Path)
    words.add_argument("--include", nargs="*", default=[])
    options = words.parse_args()
    mutants = []
    for name in options.headers:
        header = Header(options.root / name, name)
        for tree in syntax_trees(header_path := options.root / name, [options.root, *options.include]):
            header.declaration(tree)
        text, own = header.mutated(len(mutants) + 1)
        mutants += own
        out = options.out / name
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text)
        print(f"{header_path.relative_to(options.root)}: {len(own)} mutants")
    (options.out / "mutant_switch.hpp").write_text(SWITCH.replace("COMPARISONS", "".join(map(comparison, COMPARISONS))))
    (options.out / "mutants.json").write_text(json.dumps(mutants, indent=1) + "\n")


if __name__ == "__main__":
    main()
