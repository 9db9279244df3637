"""Where the lorries drive: between European cities, as the crow flies."""

from dataclasses import dataclass
from math import asin, cos, radians, sin, sqrt
from random import Random
from typing import NamedTuple

__all__ = ["Place", "Route", "distance_km", "routes", "transport_name"]

EARTH_RADIUS_KM = 6_371.0


class Place(NamedTuple):
    """Degrees."""

    latitude: float
    longitude: float


CITIES = {
    "Antwerp": Place(51.22, 4.40),
    "Barcelona": Place(41.39, 2.17),
    "Berlin": Place(52.52, 13.40),
    "Bratislava": Place(48.15, 17.11),
    "Gdansk": Place(54.35, 18.65),
    "Hamburg": Place(53.55, 9.99),
    "Helsinki": Place(60.17, 24.94),
    "Lyon": Place(45.76, 4.84),
    "Milan": Place(45.46, 9.19),
    "Munich": Place(48.14, 11.58),
    "Poznan": Place(52.41, 16.93),
    "Prague": Place(50.08, 14.44),
    "Riga": Place(56.95, 24.11),
    "Rotterdam": Place(51.92, 4.48),
    "Tallinn": Place(59.44, 24.75),
    "Vienna": Place(48.21, 16.37),
    "Vilnius": Place(54.69, 25.28),
    "Zaragoza": Place(41.65, -0.89),
}


@dataclass
class Route:
    """One lorry's tour, and how far it has come."""

    transport_id: str
    start: Place
    destination: Place
    speed_kmh: float
    driven_km: float

    def drive(self, seconds: float) -> None:
        """Go on for `seconds`; arrived, it turns back to the start of its tour."""
        self.driven_km = (self.driven_km + self.speed_kmh * seconds / 3600) % distance_km(self.start, self.destination)

    def position(self) -> Place:
        """Where it is now."""
        done = self.driven_km / distance_km(self.start, self.destination)
        return Place(
            round(self.start.latitude + (self.destination.latitude - self.start.latitude) * done, 5),
            round(self.start.longitude + (self.destination.longitude - self.start.longitude) * done, 5),
        )


def routes(count: int) -> list[Route]:
    """`count` tours, the same at every call, so that the producer and the database agree on them."""
    random = Random(1825)  # any number; this is the year of the first railway
    cities = list(CITIES.values())
    tours: list[Route] = []
    for number in range(count):
        start, destination = random.sample(cities, 2)
        driven = random.uniform(0, 0.9) * distance_km(start, destination)
        tours.append(Route(transport_name(number), start, destination, random.uniform(55, 90), driven))
    return tours


def transport_name(number: int) -> str:
    """`lorry-0042`."""
    return f"lorry-{number:04}"


def distance_km(a: Place, b: Place) -> float:
    """Along the great circle (haversine)."""
    latitudes, longitudes = radians(b.latitude - a.latitude), radians(b.longitude - a.longitude)
    h = sin(latitudes / 2) ** 2 + cos(radians(a.latitude)) * cos(radians(b.latitude)) * sin(longitudes / 2) ** 2
    return 2 * EARTH_RADIUS_KM * asin(sqrt(h))
