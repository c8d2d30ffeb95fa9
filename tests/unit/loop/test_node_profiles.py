"""The labels of a node while the API server answers, while it does not, and after a restart."""

from nodeagent.config.schema import Mode
from nodeagent.loop import node_profiles
from nodeagent.loop.node_profiles import NodeProfiles, SavedLabels
from nodeagent.model import NoteKind
from tests.support import config_files

FILE = config_files.read(
    "mode: enforce\nprofiles: [{name: gpu, nodeSelector: {pool: gpu}, mode: dry-run}, {name: b, nodeSelector: {b: c}}]"
)


def text(profiles: NodeProfiles) -> str:
    [note] = profiles.notes(profiles.apply(FILE))
    assert note.kind is NoteKind.PROFILES
    return note.message


def test_labels_change_once_for_each_other_set() -> None:
    profiles = NodeProfiles("n", None)
    assert [profiles.observe(each) for each in (None, {"pool": "gpu"}, {"pool": "gpu"}, None, {})] == [
        False,
        True,
        False,
        False,
        True,
    ]


def test_until_the_labels_are_known_nothing_is_enforced_and_the_note_says_so() -> None:
    profiles = NodeProfiles("n", None)
    assert profiles.saved is None
    assert profiles.apply(FILE).config.mode is Mode.DRY_RUN
    assert text(profiles) == "the labels of the node are not known, so no profile applies and nothing is enforced"
    profiles.observe({"pool": "cpu"})
    assert profiles.apply(FILE).config.mode is Mode.ENFORCE
    assert text(profiles) == "none of gpu, b matches this node"


def test_saved_labels_apply_until_the_api_server_answers() -> None:
    saved = SavedLabels("n", {"pool": "gpu"})
    profiles = NodeProfiles("n", saved)
    assert profiles.apply(FILE).active == ("gpu",)
    assert text(profiles) == "gpu; by the labels that an earlier process saw, until the API server answers"
    assert not profiles.observe({"pool": "gpu"})
    assert text(profiles) == "gpu"
    assert profiles.saved == saved


def test_saved_labels_of_another_node_are_ignored() -> None:
    assert NodeProfiles("n", SavedLabels("m", {"pool": "gpu"})).apply(FILE).active is None


def test_a_file_without_profiles_has_no_note() -> None:
    plain = config_files.read("mode: enforce")
    profiles = NodeProfiles("n", None)
    assert (profiles.apply(plain), profiles.notes(plain)) == (plain, ())
    assert node_profiles.active(profiles.apply(plain)) == {}


def test_each_profile_is_counted_as_active_or_not() -> None:
    assert node_profiles.active(NodeProfiles("n", None).apply(FILE)) == {"gpu": False, "b": False}
    known = NodeProfiles("n", SavedLabels("n", {"pool": "gpu"}))
    assert node_profiles.active(known.apply(FILE)) == {"gpu": True, "b": False}
