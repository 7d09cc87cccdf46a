"""``rolloutfleet plan``: files in; text, YAML, JSON or SVG out; an exit status that says how it went."""

import json
import random
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from fakes.placement.objects import engine_body, fleet_body, node_body, pod_body, write_list
from rolloutfleet_operator.offline import main

EXAMPLE = Path(__file__).parents[4] / "examples" / "placement"


@pytest.fixture
def plan(tmp_path, capsys):
    """Runs the command on fleets, nodes and pods; gives exit status, output and errors."""

    def run(fleets, nodes, pods=None, *more: str):
        arguments = [
            f"--file={write_list(tmp_path / f'fleet-{index}.yaml', [each])}" for index, each in enumerate(fleets)
        ]
        arguments.append(f"--nodes={write_list(tmp_path / 'nodes.yaml', nodes)}")
        if pods is not None:
            arguments.append(f"--pods={write_list(tmp_path / 'pods.yaml', pods)}")
        status = main([*arguments, *more])
        told = capsys.readouterr()
        return status, told.out, told.err

    return run


def racks(count: int, nodes: int = 2, gpus: str = "8") -> list[dict]:
    return [node_body(f"n{rack}{index}", f"r{rack}", gpus) for rack in range(count) for index in range(nodes)]


def test_text_shows_nodes_ranks_tree_racks_and_score(plan):
    status, out, err = plan([fleet_body()], racks(3), [pod_body("x", "n01", "2")])
    assert (status, err) == (0, "")
    assert (
        out
        == """\
rl/large: 2 of 2 engines placed (Placed), TP 8 x PP 2 x DP 1 = 16 GPUs each
  read from the spec: parallelism.pipeline, parallelism.tensor, placement.engine, replicas
     ENGINE  IN            NODES AND RANKS
  0  0       rack r1  new  n10 [1-8], n11 [9-16]
  1  1       rack r2  new  n20 [17-24], n21 [25-32]

the cluster: 6 nodes, 48 GPUs, 2 engines within
  rack r0: 2 nodes, 16 GPUs, 0 engines within
  rack r1: 2 nodes, 16 GPUs, 1 engine within
  rack r2: 2 nodes, 16 GPUs, 1 engine within

┌─rack r0──────┐ ┌─rack r1──────┐ ┌─rack r2──────┐
│ n00 ········ │ │ n10 00000000 │ │ n20 11111111 │
│ n01 ▒▒······ │ │ n11 00000000 │ │ n21 11111111 │
└──────────────┘ └──────────────┘ └──────────────┘
one sign is one GPU: an engine's sign, · free, ▒ other pods, # closed node

GPUs free: 46 before, 14 after
  in whole rack domains: 32 before, 0 after
  in whole host domains: 40 before, 8 after

Noticed:
  no node carries topology.kubernetes.io/zone, so the level zone is not there
  no node carries network.topology.nvidia.com/spine, so the level block is not there
  no node carries nvidia.com/gpu.clique, so the level nvlink is not there
"""
    )


def test_the_picture_keeps_to_the_width(plan):
    _, out, _ = plan([fleet_body()], racks(6), None, "--width=40")
    assert max(len(line) for line in out.splitlines() if set(line) & set("┌│└")) <= 40


@pytest.mark.parametrize(("form", "load"), [("json", json.loads), ("yaml", yaml.safe_load)])
def test_documents_hold_nodes_ranks_and_the_affinity_that_pins(plan, form, load):
    status, out, _ = plan([fleet_body()], racks(2), None, f"--output={form}")
    document = load(out)
    assert (status, document["complete"]) == (0, True)
    assert document["fleets"][0]["engines"][1] == {
        "engine": 1,
        "domain": "rack r1",
        "stays": False,
        "pods": [
            {
                "pod": index,
                "node": node,
                "gpus": 8,
                "ranks": ranks,
                "nodeAffinity": {
                    "requiredDuringSchedulingIgnoredDuringExecution": {
                        "nodeSelectorTerms": [
                            {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
                        ]
                    }
                },
            }
            for index, (node, ranks) in enumerate([("n10", [17, 24]), ("n11", [25, 32])])
        ],
    }
    assert document["score"]["wholeGpus"][0] == {"level": "rack", "before": 32, "after": 0, "of": 32}


def test_the_picture_is_svg_with_a_square_for_each_gpu_that_says_what_it_is(plan):
    status, out, _ = plan([fleet_body(replicas=1)], racks(2), [pod_body("x", "n00", "3")], "-osvg")
    assert status == 0
    titles = [each.text for each in ElementTree.fromstring(out).iter("{http://www.w3.org/2000/svg}title")]
    assert titles[0] == "1 of 1 engines placed"
    assert (titles.count("n00: other pods"), titles.count("n00: free"), titles.count("n10: rl/large engine 0")) == (
        3,
        5,
        8,
    )


def test_names_are_escaped_in_the_picture(plan):
    _, out, _ = plan([fleet_body(replicas=1)], [node_body("n1", "<r&1>"), node_body("n2", "<r&1>")], None, "-osvg")
    ElementTree.fromstring(out)
    assert "rack &lt;r&amp;1&gt;" in out


def test_engines_stay_where_they_are_and_the_trainer_takes_the_first_ranks(plan):
    pods = [engine_body("large", 1, rank, node, 8) for rank, node in enumerate(("n01", "n00"))]
    status, out, _ = plan([fleet_body()], racks(2), pods, "-ojson", "--first-rank=4")
    engines = json.loads(out)["fleets"][0]["engines"]
    assert status == 0
    assert [(each["stays"], [(pod["node"], pod["ranks"]) for pod in each["pods"]]) for each in engines] == [
        (False, [("n10", [20, 27]), ("n11", [28, 35])]),
        (True, [("n01", [4, 11]), ("n00", [12, 19])]),
    ]


def test_an_engine_on_a_node_that_is_lost_moves_and_says_why(plan):
    nodes = [node_body("n00", "r0", ready="Unknown"), *racks(2)[1:]]
    pods = [engine_body("large", 0, rank, node, 8) for rank, node in enumerate(("n00", "n01"))]
    status, out, _ = plan([fleet_body(replicas=1)], nodes, pods)
    assert status == 0
    assert "engine 0 moves: node n00 is not Ready" in out


def test_several_fleets_share_what_there_is(plan):
    status, out, err = plan([fleet_body("a"), fleet_body("b")], racks(3))
    assert status == 4
    assert err == (
        "rolloutfleet plan: fleet rl/b: 1 of 2 engines placed; engine 1 needs 16 GPUs in one rack, 8 on each of 2 nodes, "
        "largest free is 0 (rack r0); room for 1 engine of 16 GPUs is missing\n"
    )
    assert "rl/b: 1 of 2 engines placed (DoesNotFit)" in out


def test_the_output_is_the_same_for_any_order_of_what_is_given(plan):
    nodes, pods = racks(5, 3), [pod_body(f"x{index}", f"n{index}0", "2") for index in range(3)]
    fleets = [fleet_body("a"), fleet_body("b", parallelism={"tensor": 4})]
    chance, shown = random.Random(4), set()
    for form in ("text", "yaml", "json", "svg"):
        for _ in range(4):
            for each in (nodes, pods, fleets):
                chance.shuffle(each)
            shown.add(plan(fleets, nodes, pods, f"-o{form}"))
        assert len(shown) == 1, form
        shown.clear()


def test_three_gpus_each_on_nodes_of_eight_is_refused_with_both_numbers_before_any_pod(plan):
    fleet = fleet_body(replicas=8, parallelism={"tensor": 3}, placement={})
    status, _, err = plan([fleet], racks(3, 1))
    assert status == 4
    assert "6 of 8 engines placed; engine 6 needs 3 GPUs on one node, largest free is 2 (node n00)" in err


@pytest.mark.parametrize(
    ("fleet", "status", "message"),
    [
        (
            {"parallelism": {"tensor": 16}, "placement": {}},
            3,
            "a tensor group of 16 GPUs (parallelism.tensor 16) must be in one host domain, and the largest node has 8 (node n00)",
        ),
        (
            {"parallelism": {"tensor": 8, "pipeline": 4}},
            3,
            "an engine needs 32 GPUs in one rack, 8 on each of 4 nodes, and the largest rack has 16 GPUs in all (rack r0, largest node 8)",
        ),
        (
            {"parallelism": {"tensor": 8, "gpusPerNode": 3}},
            3,
            "parallelism.gpusPerNode is 3, and the 8 GPUs of an engine (TP 8 x PP 1 x DP 1) do not divide into pods of 3",
        ),
        (
            {"parallelism": {"tensor": 4, "expert": 6}},
            3,
            "parallelism.expert is 6, which is no multiple of parallelism.tensor 4",
        ),
        (
            {"placement": {"engine": {"required": "shelf"}}},
            3,
            "placement.engine.required names the level 'shelf', which is none of cluster, zone, block, rack, nvlink, host",
        ),
        (
            {"placement": {"spread": "shelf"}},
            3,
            "placement.spread names the level 'shelf', which is none of zone, block, rack",
        ),
        ({"replicas": 3}, 4, "2 of 3 engines placed; engine 2 needs 16 GPUs in one rack, 8 on each of 2 nodes"),
    ],
)
def test_what_cannot_be_is_refused_with_the_numbers(plan, fleet, status, message):
    found, _, err = plan([fleet_body(**fleet)], racks(2))
    assert found == status
    assert err.startswith("rolloutfleet plan: fleet rl/large: ")
    assert message in err


def test_a_level_label_that_some_nodes_lack_is_named(plan):
    nodes = [*racks(1), node_body("n8"), node_body("n9")]
    status, out, err = plan([fleet_body()], nodes)
    assert status == 4
    assert (
        "network.topology.nvidia.com/leaf is not on 2 of the nodes with room, such as n8, so each counts alone" in err
    )
    assert "without network.topology.nvidia.com/leaf, 2 of 4 nodes count as a rack of their own each: n8, n9" in out


def test_levels_of_the_command_line_are_for_fleets_that_name_none(plan):
    nodes = [node_body(f"n{index}") for index in range(4)]
    for index, node in enumerate(nodes):
        node["metadata"]["labels"]["example.com/shelf"] = f"s{index // 2}"
    fleet = fleet_body(placement={"engine": {"required": "shelf"}})
    status, out, _ = plan([fleet], nodes, None, "--level", "shelf=example.com/shelf")
    assert status == 0
    assert "shelf s0" in out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "{path}: No such file or directory"),
        ("a: [", "{path} is no YAML: "),
        (b"\xff\xfe\x00", "{path} is no YAML: "),
        ("", "{path} holds no Node\n"),
        ("kind: RolloutFleet\nmetadata: {name: a}\n", "{path} holds no Node, but RolloutFleet\n"),
        ("- 3\n- 4\n", "{path} holds [3, 4], but a Node or a list of them is wanted"),
        ("items: [n1]\n", "{path} holds 'n1', but a Node or a list of them is wanted"),
        ("kind: Node\nmetadata: {}\n", "{path} holds a Node without a metadata.name that is a string"),
        ("kind: Node\nmetadata: {name: n1}\n---\nkind: Node\nmetadata: {name: n1}\n", "node n1 is listed twice"),
        ("kind: Node\nmetadata: {name: n1}\nstatus: 3\n", "node n1: status is 3, but it must be a mapping"),
    ],
)
def test_a_file_that_is_not_what_it_should_be_is_named(tmp_path, capsys, content, message):
    path, fleet = tmp_path / "nodes.yaml", write_list(tmp_path / "fleet.yaml", [fleet_body()])
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert main(["-f", fleet, "--nodes", str(path)]) == 3
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("rolloutfleet plan: " + message.format(path=path))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nodes", "x"], "the following arguments are required: -f/--file"),
        (["-f", "x", "--nodes", "x", "-o", "png"], "invalid choice: 'png'"),
        (["-f", "x", "--nodes", "x", "--level", "rack"], "'rack' is not NAME=LABEL, such as rack=example.com/rack"),
        (["-f", "x", "--nodes", "x", "--width", "3"], "'3' is no whole number of at least 20"),
        (["-f", "x", "--nodes", "x", "--first-rank", "-1"], "'-1' is no whole number of at least 0"),
    ],
)
def test_a_wrong_command_line_exits_with_2(capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_help_has_examples_and_exit_statuses(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    told = capsys.readouterr().out
    assert "kubectl get nodes -o yaml > nodes.yaml" in told
    assert [int(each) for each in re.findall(r"^  (\d)  ", told, re.MULTILINE)] == [0, 2, 3, 4]


@pytest.mark.parametrize("module", ["rolloutfleet.cli", "rolloutfleet_operator.__main__"])
def test_both_programs_plan_the_example(module):
    files = ["-f", EXAMPLE / "fleet.yaml", "--nodes", EXAMPLE / "nodes.yaml", "--pods", EXAMPLE / "pods.yaml"]
    run = subprocess.run(
        [sys.executable, "-c", f"import sys, {module} as program; sys.exit(program.main())", "plan", *files],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert "rl/large: 3 of 3 engines placed" in run.stdout
    assert "rl/small: 4 of 4 engines placed" in run.stdout
