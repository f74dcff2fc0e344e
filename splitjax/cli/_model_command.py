"""Shares among `splitjax plan`, `report` and `verify` which step they look at, and how they show and keep what they
give."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from rich.console import Console

from splitjax.auto_mesh import AUTO, AutoMesh, AutoWord
from splitjax.cli import _session
from splitjax.cli._options import (
    DEFAULT_MESH,
    DEFAULT_MODEL,
    CommandOptions,
    GroupComm,
    Library,
    MeshText,
    MicrobatchText,
    ModelName,
    ModelOption,
    OptimizerName,
    OptionValueError,
    RematText,
    RoleTexts,
    SizeText,
    check_positive,
    import_from_here,
    parse_bytes,
    parse_mesh,
    parse_microbatches,
    parse_model_options,
    parse_roles,
)
from splitjax.cli._output import print_value, write_page
from splitjax.cli._waiting import Say, waiting
from splitjax.machines import parse_target
from splitjax.mesh import MeshShape

if TYPE_CHECKING:
    from splitjax.cli._models import Planned


class Page(Protocol):
    """A value that prints itself as text and as HTML, as plans, reports and verifications do."""

    def _repr_html_(self) -> str:
        """Returns the value as a piece of HTML."""
        ...


@dataclasses.dataclass(frozen=True)
class ModelCommand(CommandOptions):
    """A command that looks at a model's training step without making the model."""

    model: ModelName = DEFAULT_MODEL
    """Which model: vgg11, vgg16, resnet18, resnet50, mobilenet_v2, mobilenet_v3_large, mobilenet_v3_small,
    efficientnet_b0, convnext_tiny, mlp, transformer, lstm, deepfm, dlrm; a name that an installed package declares; or
    package.module:factory, imported from the current folder too."""
    model_option: ModelOption = ()
    """Options of the model, such as num_layers=2, for its factory."""
    mesh: MeshText | None = None
    """Mesh axes and their sizes, data=2,model=4 if not given; auto chooses them for --devices, by predicted time, and
    for the machine of --target where it is not given."""
    devices: int | None = None
    """How many devices --mesh auto may use."""
    role: RoleTexts = ()
    """What a mesh axis is for whose name does not tell it, as x=tensor: data, storage, tensor, expert, sequence or
    stage."""
    rules: str = "splitbrain"
    """A shipped rule set (splitbrain, splitbrain_fsdp, megatron, transformer, fsdp, embedding_owner, data_parallel),
    one that an installed package declares, the path of a TOML file, or package.module:RULES; auto chooses layer by
    layer."""
    memory_budget: SizeText | None = None
    """What a device may need, such as 16GiB: where something is chosen, by auto or --choose-state, and what is compiled
    for a --target."""
    group_comm: GroupComm = "auto"
    """How examples cross from whole into split layers."""
    shard_state: bool = False
    """Also split optimizer state and gradients of parameters that stay whole."""
    choose_state: bool = False
    """Choose by predicted time and --memory-budget whether to shard the state, alone or beside --rules auto and --mesh
    auto."""
    microbatches: MicrobatchText | None = None
    """In how many parts a device takes the gradients of its examples; auto takes the fewest that --memory-budget
    allows."""
    remat: RematText | None = None
    """What repeated blocks keep for the backward pass, which computes the rest again; auto takes what is predicted to
    be fastest within --memory-budget."""
    library: Library = "linen"
    """Which of the two Flax libraries the model is written in."""
    optimizer: OptimizerName = "adam"
    """Its state follows the parameters."""
    batch_size: int = 64
    """Examples in the global batch."""
    num_classes: int | None = None
    """Width of the last layer; the model's own default if not given."""
    width: float | None = None
    """Multiplies the channels of convolutions, for models that have such an option."""
    html: pathlib.Path | None = None
    """Write it as a page to this file too."""

    @property
    def machine(self) -> str | None:
        """The target that the step is planned for; None for this machine."""
        return None

    @property
    def chosen_for(self) -> str | pathlib.Path | None:
        """The machine by whose figures auto chooses: the target, or the file of what was measured; None for that of the
        mesh."""
        return self.machine

    @property
    def layout_budget(self) -> int | None:
        """The bytes that a device may need where a layout is chosen; None for any. Raises `OptionValueError` for what
        is no size."""
        return parse_bytes(self.memory_budget, "--memory-budget")

    @property
    def num_compiled(self) -> int:
        """How many layouts at most are compiled for the target before one is chosen."""
        return 0

    def asked_mesh(self) -> MeshShape | AutoMesh:
        """Returns the shape of the mesh, or for how many devices it is to be chosen. Raises `MeshError` for options
        that make none."""
        text = self.mesh
        if text is None:
            text = DEFAULT_MESH if self.machine is None else AUTO
        if text != AUTO:
            if self.devices is not None:
                raise OptionValueError(
                    "the mesh says how many devices there are",
                    value=self.devices,
                    place="--devices",
                    remedy="leave it away, or let the mesh be chosen: --mesh auto",
                )
            return parse_mesh(text, self.role)
        check_positive(devices=self.devices)
        if self.devices is None and self.machine is None:
            raise OptionValueError(
                "a mesh is chosen for a number of devices",
                value=self.devices,
                place="--mesh auto",
                remedy="write --mesh auto --devices 8",
            )
        return AutoMesh(self.devices)

    def asked_state(self) -> bool | AutoWord:
        """Returns whether state is sharded, or is left to be chosen. Raises `OptionValueError` where both are said."""
        if not self.choose_state:
            return self.shard_state
        if self.shard_state:
            raise OptionValueError(
                "state is sharded or left to be chosen",
                value=True,
                place="--shard-state",
                remedy="leave it away, or leave --choose-state away",
            )
        return AUTO

    def planned(self, is_first: bool = True) -> Planned:
        """Returns the decorated step with the shapes of its arguments. `is_first`: whether JAX has to be prepared,
        which can be done once. Raises `OptionValueError`, `MeshError` or `ModelError` for options that make none."""
        check_positive(batch_size=self.batch_size, num_classes=self.num_classes, width=self.width)
        mesh = self.asked_mesh()
        options = parse_model_options(self.model_option)
        budget = self.layout_budget
        import_from_here(self.model, self.rules)
        if is_first:
            _session.start(_num_devices(mesh, self.machine))
        from splitjax.cli._models import LayoutChoice, ModelChoice, planned_step

        return planned_step(
            ModelChoice(self.model, self.library, self.num_classes, self.width, options),
            LayoutChoice(
                mesh,
                parse_roles(self.role),
                self.rules,
                self.group_comm,
                self.asked_state(),
                budget,
                self.chosen_for,
                parse_microbatches(self.microbatches),
                self.remat,
                self.num_compiled,
            ),
            self.optimizer,
            self.batch_size,
        )

    @property
    def where(self) -> str:
        """The mesh in words, before anything is planned."""
        mesh = self.asked_mesh()
        if isinstance(mesh, MeshShape):
            return str(mesh)
        return f"{_num_devices(mesh, self.machine)} devices"

    def busy(self, doing: str) -> AbstractContextManager[Say]:
        """Returns a block during which a terminal shows what the command is `doing` with the model's step."""
        return waiting(f"{doing} the step of {self.model} for {self.where}")

    def show(self, console: Console, planned: Planned, shown: Page, name: str, also: Sequence[Page] = ()) -> None:
        """Prints a plan, a report or a verification, and writes its page where `--html` asks for it.

        **Arguments:** `console`: where to print. `planned`: the step that was looked at. `shown`: what it gave. `name`:
        of the subcommand, for the page's title. `also`: what is shown below it, on the same page.
        """
        mesh = MeshShape.of(planned.step.mesh).with_roles(parse_roles(self.role))
        console.print(f"{planned.title}, {self.batch_size} examples on {mesh}", highlight=False)
        print_value(shown, console)
        for below in also:
            console.print()
            print_value(below, console)
        if self.html is not None:
            body = "".join(each._repr_html_() for each in (shown, *also))
            write_page(self.html, body, f"splitjax {name}")
            console.print(f"page: {self.html}", highlight=False)


def _num_devices(mesh: MeshShape | AutoMesh, target: str | None) -> int:
    """Returns how many devices a mesh has, or will have."""
    if isinstance(mesh, MeshShape):
        return mesh.num_devices
    return parse_target(target).num_devices if target is not None else mesh.num_devices or 1
