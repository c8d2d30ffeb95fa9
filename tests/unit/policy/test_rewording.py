"""The message of a victim lists the usage of its containers, which is read only after the decision."""

from nodeagent.model import ContainerUsage, Plan, PodView, Signal
from nodeagent.policy import chosen_victims, engine, state
from tests.support import nodes
from tests.support.nodes import GI, MI, NOW


def _decided() -> tuple[Plan, PodView]:
    settings = nodes.config(nodes.hard())
    view = nodes.view("hog", 4 * GI, request=MI)
    snapshot = nodes.snapshot(view, available={Signal.MEMORY: 512 * MI})
    plan, _ = engine.decide(snapshot, state.initial("test", now=NOW), now=NOW, config=settings)
    return plan, view


def test_the_message_lists_a_container_once_its_usage_is_known() -> None:
    plan, view = _decided()
    [victim] = plan.victims
    assert view.usage is not None
    name = view.pod.containers[0].name
    container = ContainerUsage("id", name, memory_working_set=4 * GI, process_count=1)
    current = chosen_victims.with_current_text(
        victim, view._replace(usage=view.usage._replace(containers=(container,))), plan=plan
    )
    assert f"Container {name} was using 4Gi, request is 1Mi, has larger consumption of memory. " in current.message
    assert current.annotations["offending_containers"] == name
    assert current._replace(message=victim.message, annotations=victim.annotations) == victim


def test_a_victim_for_another_reason_keeps_its_text() -> None:
    plan, view = _decided()
    [victim] = plan.victims
    other = victim._replace(threshold=nodes.hard(value=1), message="its own limit")
    assert chosen_victims.with_current_text(other, view, plan=plan) == other
