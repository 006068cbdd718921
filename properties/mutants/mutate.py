#!/usr/bin/env python3
"""Plants every single-statement deletion and every flipped comparison of some sources behind a run-time switch.

mutate.py SOURCE… --root DIR --out DIR     writes the changed sources below --out, and the list mutants.json

One build then holds all mutants; the environment variable LOCKSTEP_MUTANT names the one that is alive. Positions
come from clang's syntax tree, so nothing is guessed from the text. A mutant's key (file, function, kind, text, and a
number where that is not enough) survives that lines move. Left alone: declarations, the last return of a
function, LOCKSTEP_MARK, `require` (a check, not a rule), `touch` (a note for the auditor), and the branches that are dead unless a planted defect
sets a rule to a value that no variant has.
"""
import argparse
import json
import pathlib
import re
import subprocess

FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "==": "!=", "!=": "=="}
NAMES = {"<": "less", ">": "greater", "<=": "at_most", ">=": "at_least", "==": "equal", "!=": "different"}
LEFT_ALONE = (b"LOCKSTEP_MARK", b"require(", b"touch(")
RULE = re.compile(rb"rules(?:_|\(\))\.(\w+)")
KEPT = {"DeclStmt", "CompoundStmt", "NullStmt", "CaseStmt", "DefaultStmt", "CXXTryStmt"}


def syntax_trees(source: pathlib.Path, root: pathlib.Path, names: list[str]):
    """The declarations of the file whose qualified name contains one of the names."""
    for name in names:
        command = ["clang++", "-std=c++20", "-fsyntax-only", "-w", f"-I{root}", "-isystem", "/usr/include/eigen3",
                   "-Xclang", "-ast-dump=json", "-Xclang", f"-ast-dump-filter={name}", str(source)]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        decoder, at = json.JSONDecoder(), 0
        while (at := text.find("{", at)) >= 0:
            tree, at = decoder.raw_decode(text, at)
            yield tree


def broken_rules(folder: pathlib.Path) -> set[tuple[str, str]]:
    """Rules in which no two variants differ, each with a value that a planted defect gives it."""
    broken, varied = set(), set()
    for source in folder.glob("*.cpp"):
        text = source.read_text()
        broken.update(re.findall(r"&Rules::(\w+),\s*([\w:]+)\}", text))
        varied.update(re.findall(r"\.(\w+) = ", text))
    return {(rule, value) for rule, value in broken if rule not in varied}


def head_size(node):
    """Parts of an `if` up to its condition: `if (init; T x = …)` has one that begins it, and the variable."""
    return 1 + bool(node.get("hasInit")) + bool(node.get("hasVar"))


def condition(node):
    return node["inner"][head_size(node) - 1]


def branches(node):
    return node["inner"][head_size(node):]


class Source:
    def __init__(self, path: pathlib.Path):
        self.path = path
        self.text = path.read_bytes()
        self.broken = broken_rules(path.parent)
        self.found = {}  # (begin, end, kind) -> mutant
        self.function = ""  # that is being enumerated

    def span(self, node):
        """Bytes [begin, end) of a node in this file; None for what a macro made or another file holds."""
        begin, end = node.get("range", {}).get("begin", {}), node.get("range", {}).get("end", {})
        if "offset" not in begin or "offset" not in end or "includedFrom" in begin:
            return None
        return begin["offset"], end["offset"] + end["tokLen"]

    def line(self, offset):
        return self.text.count(b"\n", 0, offset) + 1

    def functions(self, tree):
        kind = tree.get("kind", "")
        if kind == "FunctionTemplateDecl":  # the pattern alone, not what it was instantiated to
            patterns = [c for c in tree.get("inner", []) if c["kind"] in ("CXXMethodDecl", "FunctionDecl")]
            yield from self.functions(patterns[0]) if patterns else ()
            return
        body = [c for c in tree.get("inner", []) if c.get("kind") == "CompoundStmt"]
        if kind in ("CXXMethodDecl", "FunctionDecl", "CXXConstructorDecl") and body:
            span = self.span(body[0])
            if span and self.text[span[0]:span[0] + 1] == b"{":
                yield tree["name"], body[0]
        for child in tree.get("inner", []):
            if child.get("kind", "").endswith("Decl"):
                yield from self.functions(child)

    def enumerate(self, function, body):
        self.function = function
        self.block(body, last=True)

    def block(self, node, last):
        children = node.get("inner", [])
        for i, child in enumerate(children):
            self.statement(child, last and i + 1 == len(children))

    def statement(self, node, last=False):
        kind = node.get("kind", "")
        span = self.span(node)
        if span is None:
            return
        words = self.text[span[0]:span[1]]
        if words.startswith(LEFT_ALONE):
            return
        if kind == "IfStmt" and re.fullmatch(rb"if \(.*\) \{\s*LOCKSTEP_MARK\([^)]*\);\s*\}", words, re.DOTALL):
            return
        if kind == "IfStmt" and self.is_always(condition(node), False):  # of a planted defect: its else is the rule
            for branch in branches(node)[1:]:
                self.statement(branch, last)
            return
        if kind == "IfStmt" and len(branches(node)) == 2 and self.is_always(condition(node), True):
            return self.statement(branches(node)[0], last)
        if kind not in KEPT and not (kind == "ReturnStmt" and last):
            self.add_deletion(node, span)
        self.inside(node, last)

    def is_always(self, node, value):
        """Whether a condition has this value wherever no defect is planted."""
        kind, inner = node.get("kind", ""), [c for c in node.get("inner", []) if c]
        if kind == "MemberExpr":
            return (self.rule_of(node), str(not value).lower()) in self.broken
        if kind == "BinaryOperator" and node.get("opcode") in ("==", "!=") and self.is_broken(self.rule_of(node)):
            begin, end = self.span(inner[1])
            is_sound = (self.rule_of(node), self.text[begin:end].decode()) not in self.broken
            return ((node["opcode"] == "==") == is_sound) == value
        if kind == "UnaryOperator" and node.get("opcode") == "!":
            return self.is_always(inner[0], not value)
        if kind == "BinaryOperator" and node.get("opcode") in ("&&", "||"):
            one_decides = (node["opcode"] == "&&") != value
            return (any if one_decides else all)(self.is_always(c, value) for c in inner)
        return len(inner) == 1 and kind in ("ParenExpr", "ImplicitCastExpr", "ExprWithCleanups") and self.is_always(
            inner[0], value)

    def rule_of(self, node):
        """The rule that an expression asks first; nothing where it asks none."""
        span = self.span(node)
        found = RULE.search(self.text[span[0]:span[1]]) if span is not None else None
        return found[1].decode() if found else ""

    def is_broken(self, rule):
        return any(rule == name for name, _ in self.broken)

    def inside(self, node, last=False):
        kind = node.get("kind", "")
        children = [c for c in node.get("inner", []) if c]
        if kind == "CompoundStmt":
            self.block(node, last)
        elif kind == "IfStmt":
            for part in node["inner"][:head_size(node)]:
                self.expression(part)
            for branch in branches(node):
                self.statement(branch, last)
        elif kind in ("ForStmt", "WhileStmt", "DoStmt", "CXXForRangeStmt", "SwitchStmt"):
            for child in children[:-1]:
                if kind != "CXXForRangeStmt":
                    self.expression(child)
            self.statement(children[-1])
        elif kind in ("CaseStmt", "DefaultStmt"):
            self.statement(children[-1], last)
        else:
            self.expression(node)

    def expression(self, node):
        kind = node.get("kind", "")
        if kind == "LambdaExpr":
            bodies = [c for c in node.get("inner", []) if c.get("kind") == "CompoundStmt"]
            if bodies:
                self.block(bodies[-1], last=True)
            return
        if kind == "VarDecl" and node.get("constexpr"):
            return
        if kind == "BinaryOperator" and self.is_always(node, node.get("opcode") == "||"):  # a planted defect decides
            return
        self.add_comparison(node)
        for child in node.get("inner", []):
            if child:
                self.expression(child)

    def add_deletion(self, node, span):
        begin, end = span
        behind = len(self.text[end:]) - len(self.text[end:].lstrip())
        if self.text[end + behind:end + behind + 1] == b";":
            end += behind + 1
        self.found.setdefault((begin, end, "deletion"), {"text": self.shown(begin, end), "function": self.function})

    def add_comparison(self, node):
        kind, operands = node.get("kind"), []
        if kind == "BinaryOperator" and node.get("opcode") in FLIPPED:
            operands = node["inner"]
        elif kind == "CXXOperatorCallExpr":
            operands = node["inner"][1:]
        elif kind == "CXXRewrittenBinaryOperator":
            call = node
            while call.get("kind") != "CXXOperatorCallExpr" and call.get("inner"):
                call = call["inner"][0]
            operands = call.get("inner", [])[1:]
        if len(operands) != 2:
            return
        spans = [self.span(operand) for operand in operands]
        whole = self.span(node)
        if None in spans or whole is None:
            return
        left, right = sorted(spans)
        operator = self.text[left[1]:right[0]].decode().strip()
        rules = RULE.findall(self.text[whole[0]:whole[1]])
        if operator not in FLIPPED or any(self.is_broken(rule.decode()) for rule in rules):
            return
        self.found.setdefault((left[0], right[1], "comparison"),
                              {"text": self.shown(left[0], right[1]), "function": self.function,
                               "operator": operator, "between": (left[1], right[0])})

    def shown(self, begin, end):
        text = " ".join(self.text[begin:end].decode().split())
        return text if len(text) <= 100 else text[:97] + "…"

    def mutated(self, first):
        """The changed text, and the mutants from number `first` on."""
        insertions, cuts, mutants, keys = [], [], [], {}
        for number, ((begin, end, kind), mutant) in enumerate(sorted(self.found.items()), first):
            if kind == "deletion":
                # Braces of its own, or an else behind it would change its if.
                insertions += [(begin, -end, f"{{ if (!lockstep::mutant({number})) {{ "), (end, begin, " } }")]
            else:
                gap = mutant["between"]
                name = NAMES[mutant["operator"]]
                insertions += [(begin, -end, f"lockstep::{name}({number}, "), (end, begin, ")"),
                               (gap[0], 0, ", ")]
                cuts.append(gap)
            key = f"{self.path.name} {mutant['function']} {kind} {mutant['text']}"
            keys[key] = keys.get(key, 0) + 1
            mutants.append({"number": number, "key": key if keys[key] == 1 else f"{key} ({keys[key]})",
                            "file": str(self.path), "line": self.line(begin), "kind": kind,
                            "text": mutant["text"]})
        pieces, at = [], 0
        # At one place: what ends there closes innermost first, then what begins opens outermost first.
        order = sorted(insertions, key=lambda i: (i[0], 0 if i[1] >= 0 else 1, -i[1] if i[1] >= 0 else i[1]))
        cut_at = dict(cuts)
        for place, _, words in order:
            pieces += [self.text[at:place], words.encode()]
            at = place
            if words == ", " and place in cut_at:
                at = cut_at[place]
        return b"".join(pieces) + self.text[at:], mutants


SWITCH = """// The mutant that is alive, and what a flipped comparison says.
#pragma once

#include <cstdlib>

namespace lockstep {

inline const int kMutant = std::getenv("LOCKSTEP_MUTANT") ? std::atoi(std::getenv("LOCKSTEP_MUTANT")) : 0;
inline bool mutant(int number) { return number == kMutant; }

""" + "\n".join(
    f"constexpr auto {NAMES[o]} = [](int number, const auto& a, const auto& b) -> bool "
    f"{{ return mutant(number) ? a {FLIPPED[o]} b : a {o} b; }};" for o in FLIPPED) + """

}  // namespace lockstep
"""


def main():
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("sources", nargs="+")
    words.add_argument("--root", required=True, type=pathlib.Path)
    words.add_argument("--out", required=True, type=pathlib.Path)
    options = words.parse_args()
    mutants = []
    for name in options.sources:
        source = Source(options.root / name)
        for tree in syntax_trees(source.path, options.root, ["lockstep::cache_sim"]):
            for function, body in source.functions(tree):
                source.enumerate(function, body)
        text, own = source.mutated(len(mutants) + 1)
        for mutant in own:
            mutant["file"] = name
        mutants += own
        out = options.out / name
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_bytes(b'#include "mutant_switch.hpp"\n' + text)
        print(f"{name}: {len(own)} mutants")
    (options.out / "mutant_switch.hpp").write_text(SWITCH)
    (options.out / "mutants.json").write_text(json.dumps(mutants, indent=1) + "\n")


main()
