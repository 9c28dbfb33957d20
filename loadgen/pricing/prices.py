"""The kinds of price, the keys of each in a price file, and the choice of the prices for a target.

Pure. No price, date or exchange rate is guessed. Amounts are `decimal.Decimal`. `price_file.py`
reads and checks a file as a whole, and `unit_cost.py` computes costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from typing import Annotated, Any, ClassVar, Literal

from loadgen_sdk import price_file
from loadgen_sdk.errors import WrongUse
from loadgen_sdk.price_file import FIELD_PARSERS, UNDATED, PerToken
from msgspec import NODEFAULT, Struct
from msgspec.structs import fields
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainValidator,
    Strict,
    ValidationInfo,
    WithJsonSchema,
    create_model,
)

from loadgen.core.errors import UserError, did_you_mean
from loadgen.core.results.manifest import TargetFacts
from loadgen.core.units import InvalidValueError
from loadgen.core.workload.file_models import Part

NOT_VERIFIED = "not verified"  # the quality of an entry that only records that its price is missing
NO_SOURCE = "not stated"  # the source of a price that a copy gives without one


def _build_parser(parse: Callable[[object], Any]) -> BeforeValidator:
    """Return a pydantic validator that parses a value of a price file with a function of the SDK.

    The SDK reads price files too, and sharing its functions makes both accept the same values. They
    raise `WrongUse`. It is converted to `InvalidValueError`, the exception for which the validation
    of a document adds the file and line.
    """

    def validate(value: object) -> object:
        try:
            return parse(value)
        except WrongUse as error:
            raise InvalidValueError(error.code, error.message, error.hint) from None

    return BeforeValidator(validate)


def _build_range_check(low: str, high: str, noun: str) -> AfterValidator:
    """Return a pydantic validator that refuses numbers outside the closed range [low, high].

    The error message says that the value must be `noun`, such as "a power usage effectiveness".
    """

    def check(value: Decimal) -> Decimal:
        if not Decimal(low) <= value <= Decimal(high):
            raise InvalidValueError("out_of_range", f"must be {noun}", f"from {low} to {high}")
        return value

    return AfterValidator(check)


_number = _build_parser(price_file.parse_number)
Amount = Annotated[Decimal, _build_parser(price_file.parse_positive_amount)]
Currency = Annotated[str, _build_parser(price_file.parse_currency)]
# The year alone is an integer in YAML.
AsOf = Annotated[
    str,
    _build_parser(price_file.parse_as_of),
    WithJsonSchema({"type": ["string", "integer"]}),
]
Text = Annotated[str, _build_parser(price_file.parse_nonempty_text), Field(min_length=1)]
Gpus = Annotated[int, Strict(), Field(ge=1, le=100_000)]


class Energy(Part):
    """The power of one machine, and who pays for it.

    `counted` says which part of the power costs money, and where, so that nothing is counted twice:

    - `included`: the price includes power. Energy is shown in kWh and joules only.
    - `hourly`: `watts` at all hours are part of the hourly price.
    - `by_load`: `idle_watts` at all hours are part of the hourly price, because an idle machine
      draws them, too. What load adds is the energy part of a cost.

    Attributes:
        watts: Power of one machine at its plug, under the measured load.
        idle_watts: Power of one idle machine at its plug.
        pue: Power usage effectiveness of the data centre.
        per_kwh: Price of a kilowatt-hour.
        counted: See above.
    """

    synonyms: ClassVar[dict[str, str]] = {
        "power": "watts",
        "power_w": "watts",
        "usd_per_kwh": "per_kwh",
    }

    watts: Amount
    idle_watts: Annotated[Decimal, _number, Field(ge=0)] | None = None
    pue: Annotated[Decimal, _number, _build_range_check("1", "3", "a power usage effectiveness")]
    per_kwh: Amount | None = None
    counted: Literal["included", "hourly", "by_load"]


class _MachinePrice(Part):
    """The keys that prices of rented and of owned machines share.

    Attributes:
        name: By which `--price DIR=NAME` and reports call the price. If it is left out, it is made
            from provider and shape.
        provider: Who sells or owns the machines.
        currency: Currency of the amounts, by default that of the file.
        as_of: The day, month or year at which the price was valid.
        source: Where the price is from.
        quality: How well the price is known, in the user's words.
        commitment: On demand, 1 year, spot, and so on.
        region: Region of the provider.
        egress_per_gb: Price per 1e9 bytes that leave the provider.
        storage_per_month: Disks of one machine, or of one GPU if machines are sold by the GPU.
        support_per_month: Support contract of one machine, or of one GPU.
    """

    name: str = ""
    provider: Text
    currency: Currency | None = None
    as_of: AsOf
    source: Text
    quality: str = ""
    commitment: str = ""
    region: str = ""
    egress_per_gb: Amount | None = None
    storage_per_month: Amount | None = None
    support_per_month: Amount | None = None


LostShare = Annotated[
    Decimal, _number, _build_range_check("0.001", "0.9", "a fraction of the paid time")
]


class Rented(_MachinePrice):
    """The price of machines that are rented by the hour.

    Exactly one of `per_hour` and `per_gpu_hour` is given, unless the entry records that its price
    is missing.

    Attributes:
        shape: The instance type, as in `loadgen run --shape`. Without it, `--price DIR=NAME`
            chooses the price.
        gpu: The GPU, such as GB300.
        gpus: GPUs of one machine. If it is given, whole machines are paid.
        per_hour: Price of one machine.
        per_gpu_hour: Price of one GPU.
        lost_share: The fraction of the paid time that interruptions of spot machines cost,
            including lost work and restarts.
        energy: Power of one machine.
        why_missing: What was looked at, if the entry records that its price is missing.
    """

    synonyms: ClassVar[dict[str, str]] = {
        "usd_per_gpu_hour": "per_gpu_hour",
        "usd_per_hour": "per_hour",
        "price": "per_hour",
        "instance": "shape",
        "date": "as_of",
        "gpus_per_shape": "gpus",
    }

    shape: str = ""
    gpu: Text
    gpus: Gpus | None = None
    per_hour: Amount | None = None
    per_gpu_hour: Amount | None = None
    lost_share: LostShare | None = None
    energy: Energy | None = None
    why_missing: str = ""


_DepreciationYears = _build_range_check("0.5", "20", "a depreciation period in years")
_StaffShare = _build_range_check("0", "1", "a fraction of the capital per year")
_DiscountRate = _build_range_check("0.001", "1", "an interest rate per year")


class Owned(_MachinePrice):
    """The price of machines that were bought.

    Their hourly price consists of the capital, staff, and the power that `energy.counted` puts
    there.

    Attributes:
        shape: The machine type, as in `loadgen run --shape`.
        gpu: The GPU, such as GB300.
        gpus: GPUs that the capital bought. A run on fewer GPUs pays its fraction.
        capital: What the machines cost.
        years: The depreciation period, in years of 8,760 hours.
        staff_share: People, space and support per year, as a fraction of the capital.
        energy: Power of one machine.
        discount: Interest per year. With it the capital is paid as an annuity, without it evenly.
    """

    provider: Text = "own"
    shape: str = ""
    gpu: Text
    gpus: Gpus
    capital: Amount
    years: Annotated[Decimal, _number, _DepreciationYears]
    staff_share: Annotated[Decimal, _number, _StaffShare]
    energy: Energy
    discount: Annotated[Decimal, _number, _DiscountRate] | None = None


_TYPE_BY_PARSER: dict[Callable[[object], object], Any] = {
    price_file.parse_amount: Annotated[Decimal, _build_parser(price_file.parse_amount)],
    price_file.parse_as_of: AsOf,
    price_file.parse_currency: Currency,
    price_file.parse_nonempty_text: Text,
    price_file.parse_text: str,
    price_file.parse_token_threshold: Annotated[
        int, _build_parser(price_file.parse_token_threshold), Field(ge=1)
    ],
}


def _build_token_price_field(name: str, default: object) -> tuple[object, object]:
    """Return the pydantic definition of a key of a price per token: its type and its default.

    The type is the one whose validator is the parser that the SDK has for this key. In pydantic, an
    ellipsis as default marks a required key. A key whose default is None may be left out or null.

    Args:
        name: The key, such as "per_million_input".
        default: The default of the field of the SDK's `PerToken`, or NODEFAULT.
    """
    parser = FIELD_PARSERS[name]
    field_type = _TYPE_BY_PARSER[parser]
    if default is NODEFAULT:
        return field_type, ...
    if default is None:
        return field_type | None, None
    return field_type, default


def _build_token_price_model() -> type[Part]:
    """Return a pydantic model with the keys and the checks of the SDK's `PerToken`.

    The SDK defines a price per token as a msgspec struct, whose errors do not say on which line of
    the file they are. The model is built from that struct, so that the two cannot differ.
    """
    field_definitions: dict[str, Any] = {
        field.name: _build_token_price_field(field.name, field.default)
        for field in fields(PerToken)
    }
    model = create_model("PerToken", __base__=Part, __doc__=PerToken.__doc__, **field_definitions)
    model.synonyms = dict(PerToken.synonyms)
    return model


_PerTokenModel = _build_token_price_model()


def _validate_token_price(value: object, info: ValidationInfo) -> PerToken:
    """Return the price per token of the SDK from its keys in a price file.

    The model checks each key, and `check_tiers` the prices that depend on the prompt length.
    """
    model = _PerTokenModel.model_validate(value, context=info.context)
    price = PerToken(**dict(model))
    try:
        price_file.check_tiers(price)
    except WrongUse as error:
        raise InvalidValueError(error.code, error.message, error.hint) from None
    return price


TokenPrice = Annotated[
    PerToken,
    PlainValidator(_validate_token_price, json_schema_input_type=_PerTokenModel),
]

Price = Rented | Owned | PerToken


class ExchangeRate(Part):
    """The price of one unit of the currency `from` in the currency `to`.

    Rates are neither inverted nor chained, so each rate that is needed must be in the file.
    """

    from_: Currency = Field(validation_alias="from")
    to: Currency
    rate: Amount
    as_of: AsOf
    source: Text


class PriceDocument(Part):
    """The keys of a price file.

    Attributes:
        currency: Currency of prices that do not name one.
        sample: True if the prices are not an offer. Using them needs --accept-sample-prices.
        notes: Text to show beside every cost.
        exchange: Exchange rates.
        rented: Prices of rented machines.
        owned: Prices of machines that were bought.
        per_token: Prices per token.
    """

    currency: Currency
    sample: bool = False
    notes: str = ""
    exchange: tuple[ExchangeRate, ...] = ()
    rented: tuple[Rented, ...] = ()
    owned: tuple[Owned, ...] = ()
    per_token: tuple[TokenPrice, ...] = ()


class Prices(Struct, frozen=True, kw_only=True):
    """The checked prices of a file, all in one currency.

    Attributes:
        file: The file, as messages name it.
        currency: The currency of all amounts.
        sample: True if the prices are a sample, not an offer.
        notes: Text to show beside every cost.
        entries: The prices.
        locations: Where each price stands (file:line:column), by the name of the price.
        exchanged: The exchange rates that were used to convert any price of the file, as text.
        exchange_rate_by_price: The exchange rate that a price was converted with, as text, by the
            name of the price. Prices that were not converted are left out.
    """

    file: str
    currency: str
    sample: bool
    notes: str
    entries: tuple[Price, ...]
    locations: Mapping[str, str]
    exchanged: tuple[str, ...]
    exchange_rate_by_price: Mapping[str, str] = {}

    def list_exchange_rates(self, used_prices: Iterable[Price]) -> list[str]:
        """Return the exchange rates that the used prices were converted with, each once."""
        rates = [self.exchange_rate_by_price.get(price.name, "") for price in used_prices]
        return [rate for rate in dict.fromkeys(rates) if rate]


def find_prices(
    prices: Prices, target: TargetFacts, price_name: str = "", result: str = ""
) -> tuple[Price, ...]:
    """Return the price of a target. There are several only if they differ in commitment alone.

    A target with an instance type ("shape") has a price of machines of that type, in its region if
    both name one. A target without has a price per token for its model and URL.

    Args:
        prices: The prices to choose from.
        target: The server that was measured.
        price_name: The name of the price that the user chose, or "" to choose by the target.
        result: The result that the price is for, as error messages name it, or "" if the price is
            for a run that has not begun.

    Raises:
        UserError: No price matches, prices of several providers, regions or kinds match, or an
            entry only records that its price is missing.
    """
    used_by = f", used by {result}" if result else ""
    if price_name:
        matching = [_find_price_by_name(prices, price_name)]
    elif target.shape:
        matching = [price for price in prices.entries if _is_for_shape(price, target)]
    else:
        matching = [price for price in prices.entries if _is_for_model(price, target)]

    if not matching:
        raise UserError(
            "no_price",
            f"no price for {_describe_target(target)}{used_by}",
            prices.file,
            _create_missing_price_hint(target, prices, result),
        )

    # Prices that agree in these properties differ only in commitment, which is not ambiguous.
    distinct_offers = {
        (price.provider.lower(), price.region.lower(), type(price)) for price in matching
    }
    if len(distinct_offers) > 1:
        candidates = [f"{price.name} ({prices.locations[price.name]})" for price in matching]
        raise UserError(
            "ambiguous",
            f"several prices for {_describe_target(target)}{used_by}",
            prices.file,
            f"choose one with --price '{result or 'DIR'}=NAME': {', '.join(candidates)}",
        )

    for price in matching:
        if isinstance(price, Rented):
            _check_has_amount(price, prices, result)

    return tuple(matching)


def describe_price(price: Price) -> str:
    """Return the commitment, date, source and quality of a price as text to show beside it."""
    date_text = UNDATED if price.as_of == UNDATED else f"as of {price.as_of}"
    source = "no source stated" if price.source == NO_SOURCE else price.source
    return ", ".join(filter(None, (price.commitment, date_text, source, price.quality)))


def _find_price_by_name(prices: Prices, name: str) -> Price:
    """Return the price with a name, which is unique. Raises UserError if there is none."""
    for price in prices.entries:
        if price.name == name:
            return price
    raise UserError(
        "unknown_name",
        f'unknown price "{name}"',
        prices.file,
        did_you_mean(name, list(prices.locations)),
    )


def _is_for_shape(price: Price, target: TargetFacts) -> bool:
    """Return True if a price of machines is for the instance type and region of a target.

    A price or a target without a region matches any region.
    """
    if isinstance(price, PerToken) or price.shape.lower() != target.shape.lower():
        return False
    if not price.region or not target.region:
        return True
    return price.region.lower() == target.region.lower()


def _is_for_model(price: Price, target: TargetFacts) -> bool:
    """Return True if a price per token is for the model of a target and for its URL.

    The URL of a price is a prefix, such as "https://api.example.com/".
    """
    if not isinstance(price, PerToken) or price.model.lower() != target.model.lower():
        return False
    return target.url.startswith(price.url)


def _check_has_amount(price: Rented, prices: Prices, result: str) -> None:
    """Raise UserError if the entry of a price file only records that its price is missing.

    Such an entry has the quality "not verified" and no amount. The hint names other prices of the
    same GPU that could stand in for it.
    """
    if _has_amount(price):
        return

    why_missing = f": {price.why_missing}" if price.why_missing else ""
    hint = "add per_hour or per_gpu_hour, with as_of and source"

    alternatives = [
        entry.name
        for entry in prices.entries
        if isinstance(entry, Rented) and entry.gpu == price.gpu and _has_amount(entry)
    ]
    if alternatives:
        hint += (
            f"; or use the price of another provider with --price '{result or 'DIR'}=NAME': "
            f"{', '.join(alternatives)}"
        )

    raise UserError(
        "no_price", f"{price.name} has no price{why_missing}", prices.locations[price.name], hint
    )


def _has_amount(price: Rented) -> bool:
    """Return True if a price has an amount, per machine or per GPU."""
    return price.per_hour is not None or price.per_gpu_hour is not None


def _describe_target(target: TargetFacts) -> str:
    """Return what a price is needed for: an instance type, or a model at a URL."""
    if target.shape:
        region = f" in {target.region}" if target.region else ""
        return f"the instance type {target.shape}{region}"
    model = target.model or "(unknown)"
    return f"the model {model} at {target.url or target.name or 'an unknown URL'}"


def _create_missing_price_hint(target: TargetFacts, prices: Prices, result: str) -> str:
    """Return the hint for a target without a price: add one to the file, or choose another one."""
    if target.shape:
        keys = f"shape: {target.shape}, per_hour, gpus, as_of and source"
        advice = f"add rented: (or owned:) with {keys}"
    else:
        advice = _create_missing_model_hint(target, prices)

    if not result:
        # A run has no option that names a price. It is chosen later, for the result.
        return advice

    return f"--price '{result}=NAME', one of: {', '.join(prices.locations)}; or {advice}"


def _create_missing_model_hint(target: TargetFacts, prices: Prices) -> str:
    """Return how a target without an instance type gets a price: as a machine, or as a model."""
    machine_prices = [price for price in prices.entries if not isinstance(price, PerToken)]
    shapes = dict.fromkeys(price.shape for price in machine_prices if price.shape)
    known_shapes = f" ({', '.join(shapes)})" if shapes else ""

    return (
        f"run with --shape{known_shapes} and --gpus for a price of machines; or add per_token: "
        f"with model: {target.model or 'NAME'}, per_million_input, per_million_output, as_of and "
        "source"
    )
